//! Azure's LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`.

use std::io::Read;
use std::path::Path;

use chrono::NaiveDateTime;
use csv::StringRecord;
use plait_core::Micros;

use super::{Arrival, Content, check_room, num_tokens};
use crate::error::SimError;

const COLUMNS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];
const TIME_FORMAT: &str = "%Y-%m-%d %H:%M:%S%.f";

pub(super) fn read(path: &Path, file: impl Read) -> Result<Vec<Arrival>, SimError> {
    let mut reader = csv::Reader::from_reader(file);
    check_columns(
        path,
        reader.headers().map_err(|error| broken(path, &error))?,
    )?;
    let mut arrivals = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| broken(path, &error))?;
        let line = record.position().map_or(0, csv::Position::line);
        check_room(path, line, arrivals.len())?;
        let arrival = arrival(&record, arrivals.len());
        arrivals.push(arrival.map_err(|problem| SimError::line(path, line, problem))?);
    }
    Ok(arrivals)
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

fn broken(path: &Path, error: &csv::Error) -> SimError {
    let line = error.position().map_or(1, csv::Position::line);
    SimError::line(path, line, error.to_string())
}
