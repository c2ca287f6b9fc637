//! The tables of metrics, error codes and exit codes.

use svc::applet::Exit;
use svc::http::problem::Code;
use svc::metrics::{ALL, MetricScope};

use super::{GeneratedSection, table};

pub fn metrics() -> GeneratedSection {
    let rows = ALL.iter().map(|metric| {
        let kind = match metric.kind {
            "Counters" => "counter",
            "Gauges" => "gauge",
            _ => "histogram",
        };
        let scope = match metric.scope {
            MetricScope::Platform => "platform",
            MetricScope::Host => "host",
            MetricScope::Everywhere => "both",
        };
        let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let labels = if labels.is_empty() { "–".to_owned() } else { labels.join(", ") };
        [format!("`{}`", metric.name), kind.to_owned(), labels, scope.to_owned(), metric.help.to_owned()]
    });
    GeneratedSection::new("metrics", table(&["metric", "type", "labels", "where", "meaning"], rows))
}

/// Renders the table of error codes, sorted by status, then by code.
pub fn errors() -> GeneratedSection {
    let mut codes = Code::ALL.to_vec();
    codes.sort_by_key(|code| (code.status().as_u16(), code.as_str()));
    let rows = codes.into_iter().map(|code| {
        let status = code.status().as_u16().to_string();
        [format!("`{}`", code.as_str()), status, code.title().to_owned(), code.remedy().to_owned()]
    });
    GeneratedSection::new("errors", table(&["`code`", "status", "meaning", "what to do"], rows))
}

pub fn exit_codes() -> GeneratedSection {
    let success = ["0".to_owned(), "Success.".to_owned()];
    let failures = Exit::ALL.iter().map(|exit| [(*exit as u8).to_string(), exit.meaning().to_owned()]);
    GeneratedSection::new("exit codes", table(&["code", "meaning"], std::iter::once(success).chain(failures)))
}
