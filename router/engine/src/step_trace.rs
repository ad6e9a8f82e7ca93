//! The step trace: work and time of each step, a JSON object a line. `plait simulate --hardware` fits its
//! cost model to it.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use plait_core::StepWork;
use serde::Serialize;

/// Records in one file at most: about 120 MB.
const MAX_RECORDS: usize = 1_000_000;
/// Records on their way to the file. A full channel drops records.
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

/// The driver's end. It never blocks.
#[derive(Clone, Debug)]
pub struct StepRecorder(Sender<StepRecord>);

impl StepRecorder {
    /// Takes a step.
    pub fn record(&self, work: &StepWork, elapsed: Duration) {
        // Dropped if the disk is too slow or the file full: a fit does not need every step.
        let _taken = self.0.try_send(StepRecord::new(work, elapsed));
    }
}

/// The writing end, on a thread of its own.
pub struct StepFile {
    path: PathBuf,
    file: BufWriter<File>,
    records: Receiver<StepRecord>,
    is_empty: bool,
}

impl StepFile {
    /// Creates the file, and the end that fills it. An existing file is an error.
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

    /// Writes until the driver has ended, the file is full or the disk fails.
    pub fn run(mut self) {
        for record in self.records.clone().iter().take(MAX_RECORDS) {
            if let Err(error) = self.write(&record) {
                return tracing::warn!("no more step records in {}: {error}", self.path.display());
            }
        }
    }

    /// Writes the records, and flushes when none waits.
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

/// Removes an empty file: it would make the next start fail.
impl Drop for StepFile {
    fn drop(&mut self) {
        if self.is_empty {
            let _removed = fs::remove_file(&self.path);
        }
    }
}
