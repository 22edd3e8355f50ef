// Bundles the page into two files, which src/dovetail/reporting/report.py writes into every report.
import { build } from "esbuild";

const output = process.argv[2] ?? "../src/dovetail/reporting/assets";

await build({
  entryPoints: { report: "src/main.ts" },
  bundle: true,
  minify: true,
  charset: "ascii",
  format: "iife",
  target: ["chrome109", "firefox115", "safari16"],
  legalComments: "none",
  outdir: output,
  logLevel: "warning",
});

await build({
  entryPoints: { report: "src/report.css" },
  minify: true,
  charset: "ascii",
  target: ["chrome109", "firefox115", "safari16"],
  legalComments: "none",
  outdir: output,
  logLevel: "warning",
});
