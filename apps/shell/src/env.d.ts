// Environment variables that the build embeds.

interface ImportMetaEnv {
  readonly NEXT_PUBLIC_IDP_PUBLISHABLE_KEY?: string;
}

interface ImportMeta {
  readonly env: ImportMetaEnv;
}
