// The identity provider, as the publishable key names it: `pk_test_` or `pk_live_`, then base64 of its host and a `$`.

/** Only a build without a key has it; a bundle with it is refused. */
const PLACEHOLDER_HOST = "placeholder-idp.invalid";

function hostOf(key: string): string | null {
  try {
    const text = atob(key.split("_")[2]?.replaceAll("-", "+").replaceAll("_", "/") ?? "");
    return /^[a-z0-9.-]+\$$/.test(text) ? text.slice(0, -1) : null;
  } catch {
    return null;
  }
}

/** `null`: the key is of another form, and says no host. */
export const idpHost = import.meta.env.NEXT_PUBLIC_IDP_PUBLISHABLE_KEY
  ? hostOf(import.meta.env.NEXT_PUBLIC_IDP_PUBLISHABLE_KEY)
  : PLACEHOLDER_HOST;
