import { defineConfig } from "vite";
import { build } from "../shared/vite";

// The shell answers for paths that only its own router knows, so its files are named from the root.
export default defineConfig({ ...build, base: "/", envPrefix: "NEXT_PUBLIC_IDP_" });
