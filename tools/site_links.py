"""Links of a built site: each must lead to a file, and its fragment to an element of that page."""
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page, and where its links and pictures lead."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.targets = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        for name in ("href", "src"):
            if values.get(name) and tag in ("a", "img", "script", "link"):
                self.targets.append(values[name])


def broken_links(site, leave_out=()):
    """'page: link' for each link without a target; pages in the folders `leave_out` are targets only."""
    site = Path(site).resolve()
    pages, found = {}, []

    def page(path):
        if path not in pages:
            pages[path] = Page(path.read_text(errors="replace"))
        return pages[path]

    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site)
        # The page for unknown addresses has absolute links, which hold only where the site is served.
        if name.parts[0] in leave_out or name.name == "404.html":
            continue
        for target in page(path).targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or target == "#":
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if goal.is_dir():
                goal = goal / "index.html"
            if not goal.is_file():
                found.append(f"{name}: '{target}' leads nowhere")
            elif parts.fragment and goal.suffix == ".html" and unquote(parts.fragment) not in page(goal).ids:
                found.append(f"{name}: '{target}': {goal.relative_to(site)} has no '#{unquote(parts.fragment)}'")
    return found
