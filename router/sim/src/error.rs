//! Errors of a simulation: what was given, what is allowed, what to do.

use std::path::{Path, PathBuf};

/// Why a simulation cannot run.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// A file that cannot be read.
    #[error("{} cannot be read: {source}", .path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A line of a file that cannot be used.
    #[error("{}:{line}: {problem}", .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
        /// What was given and what is allowed.
        problem: String,
    },
    /// A file that cannot be used as a whole.
    #[error("{}: {problem}", .path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What was given and what is allowed.
        problem: String,
    },
    /// A setting that cannot work.
    #[error("{setting} is {given}; {allowed}")]
    Setting {
        /// Its name as users write it.
        setting: String,
        /// What was given.
        given: String,
        /// What is allowed, and what to do.
        allowed: String,
    },
    /// The caller stopped the simulation.
    #[error("the simulation was stopped")]
    Stopped,
}

impl SimError {
    pub(crate) fn line(path: &Path, line: u64, problem: impl Into<String>) -> Self {
        Self::Line {
            path: path.to_owned(),
            line,
            problem: problem.into(),
        }
    }

    pub(crate) fn content(path: &Path, problem: impl Into<String>) -> Self {
        Self::Content {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    pub(crate) fn setting(
        setting: impl Into<String>,
        given: &impl ToString,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Setting {
            setting: setting.into(),
            given: given.to_string(),
            allowed: allowed.into(),
        }
    }
}

impl From<plait_core::SettingsError> for SimError {
    fn from(error: plait_core::SettingsError) -> Self {
        Self::setting(format!("--{}", error.setting), &error.given, error.allowed)
    }
}
