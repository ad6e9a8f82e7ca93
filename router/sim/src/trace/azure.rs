//! Azure's LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`.

use std::io::BufRead;
use std::path::Path;

use chrono::NaiveDateTime;
use csv::StringRecord;
use plait_core::Micros;

use super::{Arrival, Content, check_room, num_tokens};
use crate::error::SimError;
use crate::files::next_line;

const COLUMNS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];
const TIME_FORMAT: &str = "%Y-%m-%d %H:%M:%S%.f";

/// Reads line by line, because a CSV reader miscounts lines that end with a carriage return.
pub(super) fn read(path: &Path, mut file: impl BufRead) -> Result<Vec<Arrival>, SimError> {
    let mut arrivals = Vec::new();
    for number in 1.. {
        let wrong = |problem| SimError::line(path, number, problem);
        let line = next_line(&mut file).map_err(wrong)?;
        let record = columns(line.as_deref().unwrap_or_default()).map_err(wrong)?;
        if number == 1 {
            check_columns(path, &record)?;
        } else if line.is_none() {
            break;
        } else if !record.is_empty() {
            check_room(path, number, arrivals.len())?;
            arrivals.push(arrival(&record, arrivals.len()).map_err(wrong)?);
        }
    }
    Ok(arrivals)
}

/// The columns of one line; none for a blank one.
fn columns(line: &[u8]) -> Result<StringRecord, String> {
    let mut record = StringRecord::new();
    let mut reader = csv::ReaderBuilder::new();
    let mut reader = reader.has_headers(false).from_reader(line);
    reader
        .read_record(&mut record)
        .map_err(|error| error.to_string())?;
    Ok(record)
}

fn check_columns(path: &Path, headers: &StringRecord) -> Result<(), SimError> {
    if headers == COLUMNS[..] {
        return Ok(());
    }
    let given: Vec<&str> = headers.iter().collect();
    let problem = format!("the columns are {given:?}; allowed: {COLUMNS:?}");
    Err(SimError::line(path, 1, problem))
}

fn arrival(record: &StringRecord, index: usize) -> Result<Arrival, String> {
    if record.len() != COLUMNS.len() {
        let (given, allowed) = (record.len(), COLUMNS.len());
        return Err(format!("it has {given} columns; allowed: {allowed}"));
    }
    let count = |column: usize| {
        let (name, given) = (COLUMNS[column], &record[column]);
        let number = given
            .trim()
            .parse()
            .map_err(|_| format!("{name} is {given:?}; allowed: a whole number"))?;
        num_tokens(name, number)
    };
    Ok(Arrival {
        at: time(&record[0])?,
        num_prompt: count(1)?,
        num_output: count(2)?,
        tenant: 0,
        priority: 0,
        content: Content::Unique(u32::try_from(index).expect("MAX_REQUESTS fits")),
    })
}

fn time(given: &str) -> Result<Micros, String> {
    let time = NaiveDateTime::parse_from_str(given.trim(), TIME_FORMAT).ok();
    let micros = time.and_then(|time| u64::try_from(time.and_utc().timestamp_micros()).ok());
    micros.map(Micros).ok_or_else(|| {
        format!("TIMESTAMP is {given:?}; allowed: a time since 1970 like \"2023-11-16 18:15:46.6805900\"")
    })
}
