// Before the page is drawn, so that it does not flash in the other theme.
(() => {
  try {
    const theme = localStorage.getItem("disagg-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be forbidden; then the system's theme holds.
  }
})();
