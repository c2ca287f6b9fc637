// The Vite options that the shell and the default apps share. The relative `base` lets an app be served at any path.

export const viteOptions = {
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
