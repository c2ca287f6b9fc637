// The Vite options shared by all apps. Relative URLs let an app be served at any path, and builds are reproducible.

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
