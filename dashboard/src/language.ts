// Imported first. A browser whose system has the POSIX locale reports a language that is no language tag, and uPlot,
// which formats its numbers with it, would fail to load.

try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en", configurable: true });
}
