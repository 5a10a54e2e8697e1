"""A headless Chromium that a test drives."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
# No sandbox: it needs rights that root in a container lacks; the pages are ours. The rest keeps it off the network.
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def find() -> tuple[str, str] | None:
    """The browser ($CHROMIUM, or one on the path) and what drives it; ``None`` if one of them is missing."""
    browsers = (os.environ.get("CHROMIUM"), *map(shutil.which, NAMES))
    browser, driver = next(filter(None, browsers), None), shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


class Browser:
    """Args:
    driver: of selenium.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of an expression of JavaScript in the page."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def text(self, name: str) -> str:
        """What the element with this id shows."""
        return self.run("document.getElementById(arguments[0]).textContent", name)

    def size(self, width: int, height: int) -> None:
        """Of the window, however small."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """The reader prefers ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def errors(self) -> list[str]:
        """What the console has said since the last call that is at least a warning."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked(self, page: str) -> set[str]:
        """URLs that pages whose URL begins so have asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        requests = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return {one["request"]["url"] for one in requests if one["documentURL"].startswith(page)}


@contextmanager
def browser(found: tuple[str, str], profile: Path) -> Iterator[Browser]:
    """Args:
    found: what :func:`find` found.
    profile: a folder that is empty.
    """
    options = webdriver.ChromeOptions()
    options.binary_location, driver = found
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "WARNING", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()
