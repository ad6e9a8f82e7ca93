//! What a GGUF's metadata say about text.

use std::path::Path;

use plait_core::TokenId;
use plait_proto::Family;

use crate::error::ModelFilesError;
use crate::gguf::{Gguf, Value};
use crate::gguf_tokenizer::{TokenTable, build};
use crate::model_files::{ModelFacts, TemplateSources, TextFiles};
use crate::sampling::SamplingFields;
use crate::template::SpecialTokens;

/// Keys of tokens that end an answer: of a text, of a turn, of a message.
const END_KEYS: [&str; 3] = [
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
];

/// Reads everything about text in the file.
pub(crate) fn read(path: &Path) -> Result<TextFiles, ModelFilesError> {
    let gguf = Gguf::read(path)?;
    text_files(gguf).map_err(|problem| ModelFilesError::new(path, problem))
}

fn text_files(mut gguf: Gguf) -> Result<TextFiles, String> {
    let name = gguf.take_string("general.architecture")?;
    let family = Family::of_gguf(&name)?;
    let table = token_table(&mut gguf)?;
    let facts = ModelFacts {
        family,
        context_length: gguf.get_u32(&format!("{name}.context_length"))?,
        vocab_size: vocab_size(&gguf, &table)?,
        eos_token_ids: end_tokens(&gguf, &table)?,
        defaults: SamplingFields::default(),
    };
    let text_of = |key| Ok::<_, String>(gguf.get_token_id(key, &table)?.map(|id| table.text(id)));
    let special = SpecialTokens {
        bos: text_of("tokenizer.ggml.bos_token_id")?,
        eos: text_of("tokenizer.ggml.eos_token_id")?,
        pad: text_of("tokenizer.ggml.padding_token_id")?,
        unk: text_of("tokenizer.ggml.unknown_token_id")?,
    };
    let mut template = |name: &str| match gguf.metadata.remove(name) {
        Some(Value::Text(template)) => Some(template),
        _ => None,
    };
    let templates = TemplateSources {
        default: template("tokenizer.chat_template"),
        tool_use: template("tokenizer.chat_template.tool_use"),
    };
    Ok(TextFiles {
        facts,
        tokenizer: build(&table)?,
        special,
        templates,
    })
}

fn token_table(gguf: &mut Gguf) -> Result<TokenTable, String> {
    let mut table = TokenTable {
        model: gguf.take_string("tokenizer.ggml.model")?,
        pre_tokenizer: gguf
            .take_string("tokenizer.ggml.pre")
            .unwrap_or_else(|_| "default".into()),
        tokens: gguf.take_strings("tokenizer.ggml.tokens")?,
        merges: gguf
            .take_strings("tokenizer.ggml.merges")
            .unwrap_or_default(),
        kinds: Vec::new(),
        special_ids: Vec::new(),
        bos: None,
        eos: None,
    };
    if let Some(Value::Integers(kinds)) = gguf.metadata.remove("tokenizer.ggml.token_type") {
        table.kinds = kinds;
    }
    let bos = gguf.get_token_id("tokenizer.ggml.bos_token_id", &table)?;
    let eos = gguf.get_token_id("tokenizer.ggml.eos_token_id", &table)?;
    let unk = gguf.get_token_id("tokenizer.ggml.unknown_token_id", &table)?;
    let pad = gguf.get_token_id("tokenizer.ggml.padding_token_id", &table)?;
    table.special_ids = [bos, eos, unk, pad].into_iter().flatten().collect();
    let adds_bos = gguf.get_bool("tokenizer.ggml.add_bos_token");
    table.bos = bos.filter(|_| adds_bos.unwrap_or_else(|| table.begins_with_bos()));
    table.eos = eos.filter(|_| gguf.get_bool("tokenizer.ggml.add_eos_token") == Some(true));
    Ok(table)
}

/// Rows of the output head, which is as long as the embedding table.
fn vocab_size(gguf: &Gguf, table: &TokenTable) -> Result<u32, String> {
    let rows = gguf
        .shapes
        .get("token_embd.weight")
        .and_then(|shape| shape.get(1));
    let num = rows.copied().unwrap_or(table.tokens.len() as u64);
    u32::try_from(num).map_err(|_| format!("is broken: its embedding has {num} rows"))
}

fn end_tokens(gguf: &Gguf, table: &TokenTable) -> Result<Vec<TokenId>, String> {
    let mut ids = Vec::new();
    for key in END_KEYS {
        let id = gguf.get_token_id(key, table)?;
        ids.extend(id.filter(|id| !ids.contains(id)));
    }
    Ok(ids)
}

impl Gguf {
    fn take_string(&mut self, key: &str) -> Result<String, String> {
        match self.metadata.remove(key) {
            Some(Value::Text(text)) => Ok(text),
            Some(_) => Err(format!("is broken: `{key}` is not a string")),
            None => Err(format!("has no key `{key}`; take a complete GGUF")),
        }
    }

    fn take_strings(&mut self, key: &str) -> Result<Vec<String>, String> {
        match self.metadata.remove(key) {
            Some(Value::Texts(texts)) => Ok(texts),
            Some(_) => Err(format!("is broken: `{key}` is not a list of strings")),
            None => Err(format!("has no key `{key}`; take a complete GGUF")),
        }
    }

    fn get_u32(&self, key: &str) -> Result<u32, String> {
        match self.metadata.get(key) {
            Some(&Value::Integer(number)) => {
                u32::try_from(number).map_err(|_| format!("is broken: `{key}` is {number}"))
            }
            Some(_) => Err(format!("is broken: `{key}` is not a whole number")),
            None => Err(format!("has no key `{key}`; take a complete GGUF")),
        }
    }

    fn get_bool(&self, key: &str) -> Option<bool> {
        match self.metadata.get(key) {
            Some(&Value::Bool(flag)) => Some(flag),
            _ => None,
        }
    }

    /// The token that a key names, if it names one.
    fn get_token_id(&self, key: &str, table: &TokenTable) -> Result<Option<TokenId>, String> {
        if !self.metadata.contains_key(key) {
            return Ok(None);
        }
        let id = self.get_u32(key)?;
        if (id as usize) < table.tokens.len() {
            return Ok(Some(id));
        }
        let num = table.tokens.len();
        Err(format!(
            "is broken: `{key}` is {id}, and there are {num} tokens"
        ))
    }
}
