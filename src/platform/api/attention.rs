//! Items that need attention, in a heartbeat: `[{code, detail}]`.

use serde_json::{Value, json};

use svc_http::fields::Fields;
use svc_http::openapi::{fields, matching, some_text};

const MAX_ITEMS: usize = 16;
const MAX_CODE_CHARS: usize = 40;

/// Reads the items of a heartbeat; an empty list if the field is absent.
pub fn read(heartbeat: &mut Fields) -> Value {
    if !heartbeat.has("attention") {
        return json!([]);
    }
    let mut items = Vec::new();
    for mut item in heartbeat.each("attention", 0..=MAX_ITEMS).unwrap_or_default() {
        let code = item.text("code", MAX_CODE_CHARS);
        if code.as_deref().is_some_and(|code| !is_code(code)) {
            item.wrong("code", "must consist of lower-case letters and underscores");
        }
        let detail = item.required_reported("detail");
        heartbeat.close(item);
        items.extend(code.zip(detail).map(|(code, detail)| json!({"code": code, "detail": detail})));
    }
    items.into()
}

fn is_code(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

pub fn attention_schema() -> Value {
    let code = matching(&format!("^[a-z_]{{1,{MAX_CODE_CHARS}}}$"));
    let item = fields(&[("code", code), ("detail", some_text())], &[]);
    json!({ "type": "array", "items": item, "maxItems": MAX_ITEMS })
}
