//! The decoders, each with what its inputs are made of and what it may need.

mod model_files;
mod openai;
mod schemas;
mod tool_calls;
mod traces;
mod wire;

use std::fs;
use std::path::{Path, PathBuf};

/// A decoder of bytes from outside.
pub struct Target {
    /// Of its folder in the corpus too.
    pub name: &'static str,
    /// What its format is made of.
    pub words: &'static [&'static [u8]],
    /// Most memory for one input, beyond 64 bytes for each of its own.
    pub max_mib: usize,
    /// Inputs of a reduced run.
    #[cfg_attr(not(test), expect(dead_code, reason = "only `make test` runs reduced"))]
    pub num_reduced: u64,
    /// Decodes; whether the input was taken. A panic is a failure, an error is not.
    pub decode: fn(&[u8]) -> bool,
}

/// All of them.
pub fn all() -> Vec<Target> {
    let mut targets = vec![wire::frames()];
    targets.extend(model_files::all());
    targets.extend(schemas::all());
    targets.extend([tool_calls::output(), openai::request(), openai::text_call()]);
    targets.extend(traces::all());
    targets
}

impl Target {
    /// The inputs of the corpus: hand-made ones, and those that once failed.
    pub fn corpus(&self) -> Vec<Vec<u8>> {
        let mut inputs = files_of(&root().join("tests/fuzz/corpus").join(self.name));
        if self.name == "frames" {
            inputs.extend(files_of(&root().join("proto/golden")));
        }
        assert!(!inputs.is_empty(), "{} has a corpus", self.name);
        inputs
    }
}

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn files_of(folder: &Path) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    // Beside each golden message lies its description.
    paths.retain(|path| {
        !path.with_extension("bin").exists() || path.extension().is_some_and(|it| it == "bin")
    });
    paths.sort();
    paths
        .iter()
        .filter_map(|path| fs::read(path).ok())
        .collect()
}
