//! The engine's log on stderr: text in the format of the workers' lines, or JSON objects.

use std::fmt;
use std::io::Write as _;
use std::sync::OnceLock;

use chrono::SecondsFormat;
use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::lossy_stderr::{LossyStderr, PIECE};
use crate::settings::LogLevel;

/// Sets the level of the process's log.
type SetLevel = Box<dyn Fn(EnvFilter) + Send + Sync>;
static SET_LEVEL: OnceLock<SetLevel> = OnceLock::new();

/// Starts the log. The process's first engine decides the level, and whether lines are JSON.
pub fn start(level: LogLevel, writes_json: bool) {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(|| LossyStderr)
        .with_ansi(false)
        .event_format(Lines { writes_json })
        .with_filter_reloading();
    let handle = subscriber.reload_handle();
    // An error means that another engine of this process has started it.
    if subscriber.try_init().is_ok() {
        let set_level: SetLevel = Box::new(move |level| {
            handle
                .reload(level)
                .expect("the log lives as long as the process");
        });
        let _first = SET_LEVEL.set(set_level);
        if writes_json {
            log_panics();
        }
    }
}

/// Changes the level of a log that was started; false for a word that is no level.
pub fn set_level(word: &str) -> bool {
    let level = serde_json::from_value::<LogLevel>(word.into());
    if let (Ok(level), Some(set_level)) = (&level, SET_LEVEL.get()) {
        set_level(filter(*level));
    }
    level.is_ok()
}

fn filter(level: LogLevel) -> EnvFilter {
    let level = match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warning => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
    };
    EnvFilter::default().add_directive(level.into())
}

/// Writes panics as lines of the log, with the stack where `RUST_BACKTRACE` asks for one.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed");
        let stack = std::backtrace::Backtrace::capture();
        let message = format!("thread {name}: {panic}; stack: {stack}");
        for line in json_lines("ERROR", &message, &Map::new()) {
            let _dropped = LossyStderr.write_all(line.as_bytes());
        }
    }));
}

/// `2026-01-31 12:00:00,000 INFO engine: message`, as Python's logging writes times and levels, or a JSON object.
struct Lines {
    writes_json: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
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
        if self.writes_json {
            let mut said = Said::default();
            event.record(&mut said);
            let level = level_name(*event.metadata().level());
            for line in json_lines(level, &said.message, &said.fields) {
                writer.write_str(&line)?;
            }
            return Ok(());
        }
        let time = chrono::Local::now().format("%Y-%m-%d %H:%M:%S,%3f");
        let level = level_name(*event.metadata().level());
        write!(writer, "{time} {level} engine: ")?;
        context
            .field_format()
            .format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "ERROR",
        Level::WARN => "WARNING",
        Level::INFO => "INFO",
        Level::DEBUG | Level::TRACE => "DEBUG",
    }
}

/// An event's message and its other fields.
#[derive(Default)]
struct Said {
    message: String,
    fields: Map<String, Value>,
}

impl Said {
    fn take(&mut self, field: &Field, value: Value) {
        self.fields.insert(field.name().to_owned(), value);
    }
}

impl Visit for Said {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.take(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.take(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.take(field, text.into());
        }
    }
}

/// A line, or several of one that a pipe would not take as a whole.
fn json_lines(level: &str, message: &str, fields: &Map<String, Value>) -> Vec<String> {
    let time = chrono::Local::now().to_rfc3339_opts(SecondsFormat::Millis, false);
    let mut record = json!({"time": time, "level": level, "source": "engine", "message": message});
    if let Some(record) = record.as_object_mut() {
        record.extend(fields.clone());
    }
    let line = format!("{record}\n");
    let mut before_half = (0..=message.len() / 2).rev();
    let half = before_half
        .find(|at| message.is_char_boundary(*at))
        .unwrap_or(0);
    if line.len() <= PIECE || half == 0 {
        return vec![line];
    }
    let mut lines = json_lines(level, &message[..half], fields);
    lines.extend(json_lines(level, &message[half..], fields));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_becomes_lines_that_a_pipe_takes_whole() {
        let message = "\u{1}\u{20ac}".repeat(2000);
        let fields = Map::from_iter([("replica".to_owned(), json!(1))]);
        let lines = json_lines("INFO", &message, &fields);
        assert!(lines.len() > 1 && lines.iter().all(|line| line.len() <= PIECE));
        let records = lines.iter().map(|line| serde_json::from_str::<Value>(line));
        let said: String = records
            .map(|record| {
                let record = record.expect("each line is JSON");
                assert_eq!(
                    (&record["level"], &record["replica"]),
                    (&json!("INFO"), &json!(1))
                );
                record["message"].as_str().expect("a text").to_owned()
            })
            .collect();
        assert_eq!(said, message);
    }
}
