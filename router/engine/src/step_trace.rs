//! What each step computed and how long it took, a JSON object a line: `plait simulate --hardware` reads
//! it and fits its cost model to it.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use plait_core::StepWork;
use serde::Serialize;

/// Records in one file at most, some 120 MB.
const MAX_RECORDS: usize = 1_000_000;
/// Records on their way to the file; where the disk is that far behind, some are lost.
const MAX_WAITING: usize = 4096;

/// One line, as `plait_sim` reads it.
#[derive(Serialize)]
struct StepRecord {
    prefill_tokens: u64,
    prefill_pairs: u64,
    decode_rows: u64,
    decode_kv_tokens: u64,
    seconds: f64,
}

impl StepRecord {
    fn new(work: &StepWork, elapsed: Duration) -> Self {
        Self {
            prefill_tokens: work.num_prefill_tokens,
            prefill_pairs: work.num_prefill_pairs,
            decode_rows: work.num_decode_rows,
            decode_kv_tokens: work.num_decode_kv_tokens,
            seconds: elapsed.as_secs_f64(),
        }
    }
}

/// The driver's end, which never waits.
#[derive(Clone, Debug)]
pub struct StepRecorder(Sender<StepRecord>);

impl StepRecorder {
    /// Takes a step.
    pub fn record(&self, work: &StepWork, elapsed: Duration) {
        // Where the disk is too far behind, or the file full, the step is left out: a fit needs not all.
        let _taken = self.0.try_send(StepRecord::new(work, elapsed));
    }
}

/// The end that writes, on a thread of its own.
pub struct StepFile {
    path: PathBuf,
    file: BufWriter<File>,
    records: Receiver<StepRecord>,
    is_empty: bool,
}

impl StepFile {
    /// A new file, and what fills it; a file that is there already is somebody's and stays as it is.
    pub fn create(path: &Path) -> io::Result<(StepRecorder, Self)> {
        let (sender, records) = bounded(MAX_WAITING);
        let file = Self {
            path: path.to_owned(),
            file: BufWriter::new(File::create_new(path)?),
            records,
            is_empty: true,
        };
        Ok((StepRecorder(sender), file))
    }

    /// Writes until the driver has hung up, the file is full or the disk fails.
    pub fn run(mut self) {
        for record in self.records.clone().iter().take(MAX_RECORDS) {
            if let Err(error) = self.write(&record) {
                return tracing::warn!("no more step records in {}: {error}", self.path.display());
            }
        }
    }

    /// What is written can be read as soon as nothing more waits.
    fn write(&mut self, record: &StepRecord) -> io::Result<()> {
        self.is_empty = false;
        serde_json::to_writer(&mut self.file, record)?;
        self.file.write_all(b"\n")?;
        if self.records.is_empty() {
            self.file.flush()?;
        }
        Ok(())
    }
}

/// A start that failed before the first step leaves nothing that would refuse the next one.
impl Drop for StepFile {
    fn drop(&mut self) {
        if self.is_empty {
            let _removed = fs::remove_file(&self.path);
        }
    }
}
