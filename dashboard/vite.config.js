// Builds into the Python package. The hash of the sources is stored beside the files, so that a test can tell whether
// the committed build is that of the committed sources, without Node.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const OUT = "../src/fairlane/http/dashboard";
const FILES = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.js"];

function sources() {
  const found = readdirSync("src", { recursive: true, withFileTypes: true })
    .filter((each) => each.isFile())
    .map((each) => join(each.parentPath, each.name).replaceAll("\\", "/"));
  return [...FILES, ...found].sort();
}

const recordSources = {
  name: "record-sources",
  apply: (config) => config.build?.outDir === OUT,
  closeBundle() {
    const lines = sources().map((path) => `${createHash("sha256").update(readFileSync(path)).digest("hex")}  ${path}`);
    writeFileSync(join(OUT, "sources.sha256"), lines.join("\n") + "\n");
  },
};

export default {
  base: "./",
  plugins: [recordSources],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: true,
  },
};
