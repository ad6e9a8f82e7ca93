//! The vectors of `/v1/embeddings`: one body.

use serde::Serialize;

use crate::choice_state::{ChoiceState, ResponseContext};
use crate::choices::Choices;
use crate::json::append;
use crate::renderer::Renderer;
use crate::request::{EmbeddingFields, GenerateRequest};

/// Writes `OpenAI`'s list of embeddings.
#[derive(Debug)]
pub(crate) struct EmbeddingsRenderer {
    model: String,
    fields: EmbeddingFields,
}

#[derive(Serialize)]
struct Body<'a> {
    object: &'static str,
    data: Vec<Embedding>,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
}

#[derive(Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Elements(Vec<f32>),
    Base64(String),
}

impl EmbeddingsRenderer {
    pub(crate) fn new(request: &GenerateRequest, fields: EmbeddingFields) -> Self {
        Self {
            model: request.model.clone(),
            fields,
        }
    }

    /// The first dimensions, of length 1.
    fn vector(&self, pooled: &[f32]) -> Vector {
        let kept = self
            .fields
            .dimensions
            .and_then(|it| usize::try_from(it).ok());
        let kept = &pooled[..kept.unwrap_or(pooled.len()).min(pooled.len())];
        let length = kept
            .iter()
            .map(|&it| f64::from(it).powi(2))
            .sum::<f64>()
            .sqrt();
        // A vector of zeros stays one.
        let scale = if length > 0.0 { length.recip() } else { 1.0 };
        #[expect(clippy::cast_possible_truncation, reason = "it is told as f32")]
        let elements = kept.iter().map(|&it| (f64::from(it) * scale) as f32);
        if self.fields.is_base64 {
            Vector::Base64(base64(
                &elements.flat_map(f32::to_le_bytes).collect::<Vec<u8>>(),
            ))
        } else {
            Vector::Elements(elements.collect())
        }
    }
}

impl Renderer for EmbeddingsRenderer {
    fn is_stream(&self) -> bool {
        false
    }

    fn write_news(&mut self, _: &ResponseContext, _: usize, _: &mut ChoiceState, _: &mut Vec<u8>) {}

    fn write_choice_end(
        &mut self,
        _: &ResponseContext,
        _: usize,
        _: &ChoiceState,
        _: &mut Vec<u8>,
    ) {
    }

    fn write_end(&mut self, context: &ResponseContext, choices: &Choices, out: &mut Vec<u8>) {
        let data = choices.embeddings().iter().enumerate();
        let num_tokens = choices.counts(context).num_prompt;
        let body = Body {
            object: "list",
            data: data
                .map(|(index, pooled)| Embedding {
                    object: "embedding",
                    index,
                    embedding: self.vector(pooled),
                })
                .collect(),
            model: &self.model,
            usage: Usage {
                prompt_tokens: num_tokens,
                total_tokens: num_tokens,
            },
        };
        append(&body, out);
    }
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let at = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for place in 0..4 {
            let digit = ALPHABET[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= chunk.len() {
                digit.into()
            } else {
                '='
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_rfc() {
        let told = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (bytes, text) in told {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
