//! The head of a GGUF file: its metadata and its table of tensors.
//!
//! The file is untrusted. Every count and length is checked against a cap and against the bytes left.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3,
//! little-endian.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read as _};
use std::path::Path;

use crate::error::ModelFilesError;

const MAGIC: &[u8] = b"GGUF";
const MAX_KEYS: u64 = 4096;
const MAX_TENSORS: u64 = 65_536;
const MAX_KEY_BYTES: u64 = 1024;
const MAX_STRING_BYTES: u64 = 4 << 20;
const MAX_ARRAY_ITEMS: u64 = 4 << 20;
const MAX_DIMENSIONS: u32 = 8;
/// Bytes of the whole head.
const MAX_HEAD_BYTES: u64 = 512 << 20;
const DEFAULT_ALIGNMENT: u64 = 32;

/// A value of the metadata; arrays of kinds that are not needed are skipped.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Integer(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Integers(Vec<i64>),
    Skipped,
}

/// The head of a GGUF file.
#[derive(Debug)]
pub(crate) struct Gguf {
    pub(crate) metadata: HashMap<String, Value>,
    /// Shapes by name, the fastest dimension first.
    pub(crate) shapes: HashMap<String, Vec<u64>>,
}

impl Gguf {
    /// Reads the head and checks that every tensor begins within the file.
    pub(crate) fn read(path: &Path) -> Result<Self, ModelFilesError> {
        let problem = |problem: String| ModelFilesError::new(path, problem);
        let file = File::open(path).map_err(|error| problem(error.to_string()))?;
        let num_bytes = file
            .metadata()
            .map_err(|error| problem(error.to_string()))?
            .len();
        let mut reader = HeadReader {
            bytes: BufReader::with_capacity(1 << 18, file),
            num_read: 0,
            num_bytes,
        };
        reader.head().map_err(problem)
    }
}

/// Kinds of values by their numbers in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Unsigned(u8),
    Signed(u8),
    Float(u8),
    Bool,
    Text,
    Array,
}

impl Kind {
    fn of(number: u32) -> Result<Self, String> {
        Ok(match number {
            0 => Self::Unsigned(1),
            1 => Self::Signed(1),
            2 => Self::Unsigned(2),
            3 => Self::Signed(2),
            4 => Self::Unsigned(4),
            5 => Self::Signed(4),
            6 => Self::Float(4),
            7 => Self::Bool,
            8 => Self::Text,
            9 => Self::Array,
            10 => Self::Unsigned(8),
            11 => Self::Signed(8),
            12 => Self::Float(8),
            _ => return Err(format!("is broken: {number} is not a kind of value")),
        })
    }

    /// The least bytes of a value.
    fn least_bytes(self) -> u64 {
        match self {
            Self::Unsigned(width) | Self::Signed(width) | Self::Float(width) => width.into(),
            Self::Bool => 1,
            Self::Text => 8,
            Self::Array => 12,
        }
    }
}

/// Reads forward, never past the end or the cap.
struct HeadReader {
    bytes: BufReader<File>,
    num_read: u64,
    num_bytes: u64,
}

impl HeadReader {
    fn head(&mut self) -> Result<Gguf, String> {
        self.magic()?;
        let num_tensors = self.count("tensors", MAX_TENSORS)?;
        let num_keys = self.count("metadata keys", MAX_KEYS)?;
        let mut metadata = HashMap::new();
        for _ in 0..num_keys {
            let key = self.text("a key", MAX_KEY_BYTES)?;
            let kind = Kind::of(self.u32()?)?;
            let value = self.value(kind)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("is broken: the key `{key}` is there twice"));
            }
        }
        let shapes = self.tensors(num_tensors, alignment(&metadata)?)?;
        Ok(Gguf { metadata, shapes })
    }

    fn magic(&mut self) -> Result<(), String> {
        let mut magic = [0; 4];
        let is_gguf = self.fill(&mut magic).is_ok() && magic == MAGIC;
        if !is_gguf {
            return Err(
                "is neither a folder nor a GGUF file; give a Hugging Face folder \
                        (config.json, tokenizer.json, safetensors) or a .gguf file"
                    .to_owned(),
            );
        }
        match self.u32()? {
            2 | 3 => Ok(()),
            version => Err(format!("is a GGUF of version {version}; 2 and 3 are read")),
        }
    }

    fn tensors(&mut self, num: u64, alignment: u64) -> Result<HashMap<String, Vec<u64>>, String> {
        let mut shapes = HashMap::new();
        let mut last_offset = 0;
        for _ in 0..num {
            let name = self.text("a tensor's name", MAX_KEY_BYTES)?;
            let shape = self.shape()?;
            self.u32()?;
            last_offset = last_offset.max(self.u64()?);
            shapes.insert(name, shape);
        }
        let data = self.num_read.next_multiple_of(alignment);
        if num > 0 && data.saturating_add(last_offset) >= self.num_bytes {
            return Err(self.truncated_error());
        }
        Ok(shapes)
    }

    fn shape(&mut self) -> Result<Vec<u64>, String> {
        let num_dimensions = self.u32()?;
        if num_dimensions > MAX_DIMENSIONS {
            return Err(format!(
                "is broken: a tensor has {num_dimensions} dimensions"
            ));
        }
        (0..num_dimensions).map(|_| self.u64()).collect()
    }

    fn value(&mut self, kind: Kind) -> Result<Value, String> {
        Ok(match kind {
            Kind::Unsigned(_) | Kind::Signed(_) => Value::Integer(self.integer(kind)?),
            Kind::Float(4) => Value::Float(f32::from_le_bytes(self.array()?).into()),
            Kind::Float(_) => Value::Float(f64::from_le_bytes(self.array()?)),
            Kind::Bool => Value::Bool(self.array::<1>()? != [0]),
            Kind::Text => Value::Text(self.text("a string", MAX_STRING_BYTES)?),
            Kind::Array => self.list()?,
        })
    }

    fn integer(&mut self, kind: Kind) -> Result<i64, String> {
        Ok(match kind {
            Kind::Unsigned(1) => u8::from_le_bytes(self.array()?).into(),
            Kind::Signed(1) => i8::from_le_bytes(self.array()?).into(),
            Kind::Unsigned(2) => u16::from_le_bytes(self.array()?).into(),
            Kind::Signed(2) => i16::from_le_bytes(self.array()?).into(),
            Kind::Unsigned(4) => self.u32()?.into(),
            Kind::Signed(4) => i32::from_le_bytes(self.array()?).into(),
            Kind::Signed(_) => i64::from_le_bytes(self.array()?),
            _ => i64::try_from(self.u64()?)
                .map_err(|_| "is broken: a number is above 2^63".to_owned())?,
        })
    }

    fn list(&mut self) -> Result<Value, String> {
        let kind = Kind::of(self.u32()?)?;
        let num = self.count("items of an array", MAX_ARRAY_ITEMS)?;
        self.check_left(num * kind.least_bytes())?;
        match kind {
            Kind::Text => {
                let items = (0..num).map(|_| self.text("a string", MAX_STRING_BYTES));
                Ok(Value::Texts(items.collect::<Result<_, _>>()?))
            }
            Kind::Unsigned(_) | Kind::Signed(_) => {
                let items = (0..num).map(|_| self.integer(kind));
                Ok(Value::Integers(items.collect::<Result<_, _>>()?))
            }
            Kind::Float(width) => self.skip(num * u64::from(width)),
            Kind::Bool => self.skip(num),
            Kind::Array => Err("is broken: an array holds arrays".to_owned()),
        }
    }

    fn skip(&mut self, num_bytes: u64) -> Result<Value, String> {
        self.check_left(num_bytes)?;
        let forward = i64::try_from(num_bytes).expect("below the cap of the head");
        let sought = self.bytes.seek_relative(forward);
        sought.map_err(|error| error.to_string())?;
        self.num_read += num_bytes;
        Ok(Value::Skipped)
    }

    fn text(&mut self, what: &str, max_bytes: u64) -> Result<String, String> {
        let length = self.u64()?;
        if length > max_bytes {
            return Err(format!(
                "is broken: {what} of {length} bytes, where {max_bytes} are allowed"
            ));
        }
        self.check_left(length)?;
        let mut text = vec![0; usize::try_from(length).expect("below the cap of a string")];
        self.fill(&mut text)?;
        String::from_utf8(text).map_err(|error| format!("is broken: {what} is not UTF-8: {error}"))
    }

    fn count(&mut self, what: &str, max: u64) -> Result<u64, String> {
        let count = self.u64()?;
        if count > max {
            return Err(format!(
                "is broken: {count} {what}, where {max} are allowed"
            ));
        }
        Ok(count)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), String> {
        self.check_left(into.len() as u64)?;
        self.bytes
            .read_exact(into)
            .map_err(|error| error.to_string())?;
        self.num_read += into.len() as u64;
        Ok(())
    }

    fn check_left(&self, num_bytes: u64) -> Result<(), String> {
        let end = self.num_read.saturating_add(num_bytes);
        if end > self.num_bytes {
            return Err(self.truncated_error());
        }
        if end > MAX_HEAD_BYTES {
            return Err(format!("has a head of more than {MAX_HEAD_BYTES} bytes"));
        }
        Ok(())
    }

    fn truncated_error(&self) -> String {
        let num_bytes = self.num_bytes;
        format!("is truncated: it ends after {num_bytes} bytes; download or copy it again")
    }
}

fn alignment(metadata: &HashMap<String, Value>) -> Result<u64, String> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::Integer(alignment @ 1..=65_536)) => Ok(alignment.unsigned_abs()),
        Some(other) => Err(format!("is broken: its alignment is {other:?}")),
    }
}
