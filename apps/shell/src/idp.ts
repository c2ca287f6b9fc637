// The identity provider's host, which is encoded in its publishable key: `pk_test_` or `pk_live_`, followed by the
// base64 of the host and a `$`.

/** Used by a development build without a key. The bundle builder refuses to package files that contain it. */
const PLACEHOLDER_HOST = "placeholder-idp.invalid";

function parseHost(key: string): string | null {
  try {
    const text = atob(key.split("_")[2]?.replaceAll("-", "+").replaceAll("_", "/") ?? "");
    return /^[a-z0-9.-]+\$$/.test(text) ? text.slice(0, -1) : null;
  } catch {
    return null;
  }
}

/** `null` if the key is malformed. */
export const idpHost = import.meta.env.NEXT_PUBLIC_IDP_PUBLISHABLE_KEY
  ? parseHost(import.meta.env.NEXT_PUBLIC_IDP_PUBLISHABLE_KEY)
  : PLACEHOLDER_HOST;
