"""A page in Chromium, and what goes wrong on it.

Contrast is computed here from the colours that the browser computed (WCAG 2.2, 1.4.3).
"""

# Of each visible element with its own text: the text, size, weight, colour, grounds beneath it.
TEXTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true })
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1)
    canvas.fillStyle = colour
    canvas.fillRect(0, 0, 1, 1)
    return [...canvas.getImageData(0, 0, 1, 1).data].map((value) => value / 255)
  }
  const found = []
  for (const own of document.querySelectorAll("body *")) {
    const isControl = /^(INPUT|TEXTAREA|SELECT)$/.test(own.tagName) && own.type !== "radio"
    const words = [...own.childNodes].filter((node) => node.nodeType === 3)
    const text = isControl ? own.value : words.map((node) => node.data).join("").trim()
    if (!text || !own.checkVisibility() || /^(OPTION|SCRIPT)$/.test(own.tagName)) continue
    if (own.closest(".unseen")) continue
    const style = getComputedStyle(own)
    const grounds = []
    for (let box = own; box; box = box.parentElement) {
      grounds.push(rgba(getComputedStyle(box).backgroundColor))
    }
    const weight = Number(style.fontWeight), size = parseFloat(style.fontSize)
    found.push({ text, size, weight, colour: rgba(style.color), grounds })
  }
  return found
}"""


class Visit:
    """A page at an address, and what went wrong on it."""

    def __init__(self, browser, address, width=1280, scheme="light", **options):
        viewport = {"width": width, "height": 800}
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
        self.address, self.width, self.faults = address, width, []
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("request", self._see)
        self.page.goto(address)

    def _hear(self, message):
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _see(self, request):
        if not request.url.startswith((self.address + "/", "data:")):
            self.faults.append(f"request to {request.url}")

    def tab(self, name):
        self.page.get_by_role("tab", name=name, exact=True).click()
        self.done()

    def done(self):
        """Wait for an answer."""
        self.page.wait_for_selector("#result:not([aria-busy]) > *")

    def ask(self, **values):
        for label, value in values.items():
            self.page.get_by_label(label.replace("_", " "), exact=True).fill(value)
        self.page.get_by_role("button", name="Ask", exact=True).click()
        self.page.wait_for_selector("#status:not(:empty)")
        self.check()

    def choose(self, label, value):
        """Take an option of a select, or of a group of radio buttons."""
        self.page.get_by_label(label, exact=True).select_option(value)
        self.settle()

    def press(self, name):
        self.page.get_by_role("radio", name=name, exact=True).check(force=True)
        self.settle()

    def settle(self):
        self.page.wait_for_load_state("networkidle")
        self.done()
        self.check()

    @property
    def result(self):
        return self.page.inner_text("#result")

    @property
    def error(self):
        return self.page.inner_text("#error")

    def check(self):
        """No fault, nothing wider than the screen, no text that is hard to read, nothing run."""
        assert not self.faults
        assert self.page.evaluate("document.documentElement.scrollWidth") <= self.width
        assert not self.page.evaluate("'hacked' in window")
        self.page.mouse.move(0, 0)
        faint = [
            (round(ratio, 2), text["text"][:30])
            for text in self.page.evaluate(TEXTS)
            if (ratio := contrast(text)) < least_contrast(text)
        ]
        assert not faint

    def close(self):
        assert not self.faults
        self.context.close()


def over(upper, lower):
    """A colour (red, green, blue, share) above an opaque one."""
    share = upper[3]
    mixed = (a * share + b * (1 - share) for a, b in zip(upper[:3], lower[:3], strict=True))
    return (*mixed, 1.0)


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text):
    """The ratio of a text's and its ground's luminance, 1 to 21."""
    ground = (1.0, 1.0, 1.0, 1.0)
    for colour in reversed(text["grounds"]):
        ground = over(colour, ground)
    pair = sorted(luminance(c) for c in (ground, over(text["colour"], ground)))
    return (pair[1] + 0.05) / (pair[0] + 0.05)


def least_contrast(text):
    """Of WCAG AA: 3 for large texts, 4.5 for others."""
    is_large = text["size"] >= 24 or (text["size"] >= 18.66 and text["weight"] >= 700)
    return 3 if is_large else 4.5
