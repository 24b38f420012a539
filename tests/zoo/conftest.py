"""The preset `toy` is there whichever file of tests runs alone."""

from tests.zoo import toy as toy
