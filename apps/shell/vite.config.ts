import { defineConfig } from "vite";
import { viteOptions } from "../shared/vite";

// `svc-shell` serves the page for every path without a file extension, so the page needs absolute URLs for its files.
export default defineConfig({ ...viteOptions, base: "/", envPrefix: "NEXT_PUBLIC_IDP_" });
