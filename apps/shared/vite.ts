// How all of them are built: the same sources give the same bytes, at whatever path they are served.

export const build = {
  base: "./",
  publicDir: false,
  logLevel: "warn",
  build: {
    target: "es2022",
    outDir: "dist",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
} as const;
