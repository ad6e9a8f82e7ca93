//! What can be wrong with a model's files.

use std::path::PathBuf;

/// A model's files are missing, broken or of a kind that is not served (exit code 4).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct ModelFilesError {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong, what is allowed, what to do.
    pub problem: String,
}

impl ModelFilesError {
    pub(crate) fn new(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            problem: problem.into(),
        }
    }
}
