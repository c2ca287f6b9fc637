//! Human-readable log lines: time, level, applet, message and request.

use std::fmt;

use jiff::{Timestamp, Unit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Timestamp format, always in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeFormat {
    /// `07:31:05.123`, for terminals.
    Short,
    /// With the date, for files.
    Full,
}

/// Log line format:
/// `07:31:05.123  WARN svc-platform a step failed attempts=2 | kind="resize" svc_request_id=…`
#[derive(Debug, Clone, Copy)]
pub struct LogFormat {
    pub applet: &'static str,
    pub time_format: TimeFormat,
}

impl<S, N> FormatEvent<S, N> for LogFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        self.write_time(&mut writer)?;
        write_level(&mut writer, *event.metadata().level())?;
        write!(writer, " {} ", self.applet)?;
        context.field_format().format_fields(writer.by_ref(), event)?;
        let mut separator = " | ";
        for span in context.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            let Some(fields) = extensions.get::<FormattedFields<N>>().filter(|fields| !fields.is_empty())
            else {
                continue;
            };
            write!(writer, "{separator}{fields}")?;
            separator = " ";
        }
        writeln!(writer)
    }
}

impl LogFormat {
    fn write_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let now = Timestamp::now().round(Unit::Millisecond).unwrap_or(Timestamp::UNIX_EPOCH);
        let text = format!("{now:.3}");
        let time = match self.time_format {
            TimeFormat::Full => text.as_str(),
            TimeFormat::Short => text.get(11..23).unwrap_or(&text),
        };
        if writer.has_ansi_escapes() {
            write!(writer, "\x1b[2m{time}\x1b[0m ")
        } else {
            write!(writer, "{time} ")
        }
    }
}

fn write_level(writer: &mut Writer<'_>, level: Level) -> fmt::Result {
    if !writer.has_ansi_escapes() {
        return write!(writer, "{level:>5}");
    }
    let color = match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    };
    write!(writer, "\x1b[{color}m{level:>5}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn render_line(time_format: TimeFormat, has_colors: bool) -> String {
        let buffer = Buffer::default();
        let output = buffer.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || buffer.clone())
            .with_ansi(has_colors)
            .event_format(LogFormat { applet: "svc-x", time_format });
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let outer = tracing::info_span!("operation", kind = "resize");
            let _outer = outer.enter();
            let inner = tracing::info_span!("request", svc_request_id = %"0123456789ab");
            let _inner = inner.enter();
            tracing::warn!(attempts = 2, "a step failed");
        });
        String::from_utf8(output.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn line_has_time_level_applet_message_and_request() {
        let line = render_line(TimeFormat::Short, false);
        let (time, rest) = line.split_at(12);
        assert!(time.bytes().filter(|&b| b == b':').count() == 2 && time.as_bytes()[8] == b'.', "{line}");
        assert_eq!(
            rest,
            "  WARN svc-x a step failed attempts=2 | svc_request_id=0123456789ab kind=\"resize\"\n"
        );
        let line = render_line(TimeFormat::Full, false);
        let time = line.split(' ').next().unwrap();
        assert!(time.len() == 24 && time.parse::<Timestamp>().is_ok(), "{line}");
    }

    #[test]
    fn colors_are_used_only_if_enabled() {
        assert!(!render_line(TimeFormat::Full, false).contains('\x1b'));
        assert!(render_line(TimeFormat::Short, true).contains("\x1b[33m WARN\x1b[0m"));
    }
}
