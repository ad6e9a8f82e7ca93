//! The engine's log: text on stderr, in the format of the workers' lines.

use std::fmt;
use std::sync::OnceLock;

use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::lossy_stderr::LossyStderr;
use crate::settings::LogLevel;

/// Sets the level of the process's log.
type SetLevel = Box<dyn Fn(EnvFilter) + Send + Sync>;
static SET_LEVEL: OnceLock<SetLevel> = OnceLock::new();

/// Starts the log. The process's first engine decides the level.
pub fn start(level: LogLevel) {
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(|| LossyStderr)
        .with_ansi(false)
        .event_format(Lines)
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

/// `2026-01-31 12:00:00,000 INFO engine: message`, as Python's logging writes times and levels.
struct Lines;

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
