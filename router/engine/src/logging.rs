//! Logs of the engine: text on stderr.

use std::io::IsTerminal;

use tracing::level_filters::LevelFilter;

use crate::settings::LogLevel;

/// Logs from now on; the process's first engine decides the level.
pub fn start(level: LogLevel) {
    let level = match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warning => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
    };
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // Another engine of this process has started them, which is as good.
    let _started_before = subscriber.try_init();
}
