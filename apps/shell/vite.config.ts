import { defineConfig } from "vite";
import { viteOptions } from "../shared/vite";

// The gateway serves the shell's page for every unknown path, so the page needs absolute URLs for its files.
export default defineConfig({ ...viteOptions, base: "/", envPrefix: "NEXT_PUBLIC_IDP_" });
