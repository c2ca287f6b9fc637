//! Text view of published bundles.

use super::View;
use super::human::{format_bytes, format_time};
use super::table;
use crate::bundle::PublishedBundle;

pub fn list(view: &View, bundles: &[PublishedBundle]) -> String {
    if bundles.is_empty() {
        return "no bundles\n".to_owned();
    }
    let row = |b: &PublishedBundle| {
        let at = format_time(view.now, &svc_base::clock::rfc3339_ms(b.published_at));
        vec![
            b.image_version.clone().into(),
            at.into(),
            format_bytes(b.size_bytes).into(),
            b.sha256.clone().into(),
        ]
    };
    let rows: Vec<_> = bundles.iter().map(row).collect();
    table::render(view, &["VERSION", "PUBLISHED", "SIZE", "SHA256"], &rows)
}
