import { defineConfig } from "vite";
import { viteOptions } from "../shared/vite";

export default defineConfig(viteOptions);
