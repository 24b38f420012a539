"""Images from files, alone or with labels, for every family: what Pillow, CIFAR-10 and MNIST give.

Nothing is downloaded.
"""
