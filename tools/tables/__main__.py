"""Write all tables into their pages."""

from tools.tables import write
from tools.tables.frame import ROOT, pages


def main() -> None:
    """Write the pages that change."""
    for page in pages():
        text = page.read_text()
        if (new := write(text, page)) != text:
            page.write_text(new)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
