import { defineConfig } from "vite";
import { build } from "../shared/vite";

export default defineConfig(build);
