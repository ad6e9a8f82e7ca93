//! The special tokens that a tokenizer puts around a text.

use plait_core::TokenId;
use tokenizers::Tokenizer;
use tokenizers::processors::template::TemplateProcessing;

/// Makes the tokenizer put these tokens, and no others, before and after a text.
pub(crate) fn add_bos_and_eos(
    tokenizer: &mut Tokenizer,
    bos: Option<(String, TokenId)>,
    eos: Option<(String, TokenId)>,
) -> Result<(), String> {
    let text = |token: &Option<(String, TokenId)>| token.as_ref().map(|(text, _)| text.clone());
    let pieces: Vec<String> = [text(&bos), Some("$A".to_owned()), text(&eos)]
        .into_iter()
        .flatten()
        .collect();
    let tokens: Vec<(String, TokenId)> = [bos, eos].into_iter().flatten().collect();
    let template = TemplateProcessing::builder()
        .try_single(pieces)
        .map_err(|error| format!("its special tokens make no frame: {error}"))?
        .special_tokens(tokens)
        .build()
        .map_err(|error| error.to_string())?;
    tokenizer.with_post_processor(Some(template));
    Ok(())
}
