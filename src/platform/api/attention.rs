//! Reads a heartbeat's list of items that need attention: `[{code, detail}]`.

use svc_http::fields::Fields;
use svc_wire::heartbeat::{MAX_ATTENTION_CODE_CHARS, MAX_ATTENTION_ITEMS};
use svc_wire::machine::Attention;

/// Reads the items; returns an empty list if the field is absent.
pub fn read_items(heartbeat: &mut Fields) -> Vec<Attention> {
    if !heartbeat.has("attention") {
        return Vec::new();
    }
    let mut items = Vec::new();
    for mut item in heartbeat.nested_array("attention", 0..=MAX_ATTENTION_ITEMS).unwrap_or_default() {
        let code = item.required_text("code", MAX_ATTENTION_CODE_CHARS);
        if code.as_deref().is_some_and(|code| !is_code(code)) {
            item.add_error("code", "must consist of lowercase letters and underscores");
        }
        let detail = item.required_host_text("detail");
        heartbeat.close(item);
        items.extend(code.zip(detail).map(|(code, detail)| Attention { code, detail }));
    }
    items
}

fn is_code(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}
