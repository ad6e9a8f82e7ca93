//! Log-probabilities as the worker measured them, and the three forms in which clients read them.

use plait_core::TokenId;

use super::json::{write_list, write_logprob, write_str, write_u64};
use super::vocabulary::Vocabulary;

/// One token's log-probability, its rank, and the best of the vocabulary at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token itself, before temperature and filters.
    pub logprob: f32,
    /// From 1, in the whole vocabulary.
    pub rank: u32,
    /// The best tokens with their log-probabilities, best first; as many as the request asked for.
    pub best: Vec<(TokenId, f32)>,
}

/// An output token with its log-probabilities.
#[derive(Clone, Debug)]
pub(super) struct ScoredToken {
    pub(super) token: TokenId,
    pub(super) scores: TokenLogprobs,
}

/// OpenAI's form in chat: a list of tokens, each with the best at its place.
pub(super) fn write_chat(vocabulary: &Vocabulary, tokens: &[ScoredToken], out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"content\":");
    write_list(tokens, out, |scored, out| {
        write_chat_token(vocabulary, scored.token, scored.scores.logprob, out);
        out.extend_from_slice(b",\"top_logprobs\":");
        write_list(&scored.scores.best, out, |&(token, logprob), out| {
            write_chat_token(vocabulary, token, logprob, out);
            out.push(b'}');
        });
        out.push(b'}');
    });
    out.extend_from_slice(b",\"refusal\":null}");
}

/// Appends the object of one token, without its closing brace.
fn write_chat_token(vocabulary: &Vocabulary, token: TokenId, logprob: f32, out: &mut Vec<u8>) {
    let bytes = vocabulary.piece(token).bytes;
    out.extend_from_slice(b"{\"token\":");
    write_str(&String::from_utf8_lossy(bytes), out);
    out.extend_from_slice(b",\"logprob\":");
    write_logprob(logprob, out);
    out.extend_from_slice(b",\"bytes\":");
    write_list(bytes, out, |&byte, out| write_u64(byte.into(), out));
}

/// OpenAI's form in completions: four lists side by side. `num_chars` counts the characters of the
/// tokens written so far, over all chunks of a choice.
pub(super) fn write_completion(
    vocabulary: &Vocabulary,
    tokens: &[ScoredToken],
    num_chars: &mut u64,
    out: &mut Vec<u8>,
) {
    let spelled = |token| String::from_utf8_lossy(vocabulary.piece(token).bytes);
    out.extend_from_slice(b"{\"tokens\":");
    write_list(tokens, out, |scored, out| {
        write_str(&spelled(scored.token), out);
    });
    out.extend_from_slice(b",\"token_logprobs\":");
    write_list(tokens, out, |scored, out| {
        write_logprob(scored.scores.logprob, out);
    });
    out.extend_from_slice(b",\"top_logprobs\":");
    write_list(tokens, out, |scored, out| {
        write_best_by_text(vocabulary, scored, out);
    });
    out.extend_from_slice(b",\"text_offset\":");
    write_list(tokens, out, |scored, out| {
        write_u64(*num_chars, out);
        *num_chars += spelled(scored.token).chars().count() as u64;
    });
    out.push(b'}');
}

/// The best tokens and the token itself, by their text. Of two tokens with one text (pieces of
/// characters are all U+FFFD) the better one is written.
fn write_best_by_text(vocabulary: &Vocabulary, scored: &ScoredToken, out: &mut Vec<u8>) {
    let own = (scored.token, scored.scores.logprob);
    let mut written: Vec<String> = Vec::with_capacity(scored.scores.best.len() + 1);
    out.push(b'{');
    for &(token, logprob) in scored.scores.best.iter().chain([&own]) {
        let text = String::from_utf8_lossy(vocabulary.piece(token).bytes).into_owned();
        if written.contains(&text) {
            continue;
        }
        if !written.is_empty() {
            out.push(b',');
        }
        write_str(&text, out);
        out.push(b':');
        write_logprob(logprob, out);
        written.push(text);
    }
    out.push(b'}');
}

/// vLLM's form for prompts: null for the first token, then one object by token id for each.
pub(super) fn write_prompt(
    vocabulary: &Vocabulary,
    prompt: &[TokenId],
    scores: &[Option<TokenLogprobs>],
    out: &mut Vec<u8>,
) {
    write_list(
        prompt.iter().zip(scores),
        out,
        |(&token, scores), out| match scores {
            None => out.extend_from_slice(b"null"),
            Some(scores) => write_prompt_token(vocabulary, token, scores, out),
        },
    );
}

fn write_prompt_token(
    vocabulary: &Vocabulary,
    token: TokenId,
    scores: &TokenLogprobs,
    out: &mut Vec<u8>,
) {
    out.push(b'{');
    write_ranked(vocabulary, token, scores.logprob, scores.rank, out);
    for (rank, &(other, logprob)) in (1..).zip(&scores.best) {
        if other != token {
            out.push(b',');
            write_ranked(vocabulary, other, logprob, rank, out);
        }
    }
    out.push(b'}');
}

fn write_ranked(
    vocabulary: &Vocabulary,
    token: TokenId,
    logprob: f32,
    rank: u32,
    out: &mut Vec<u8>,
) {
    out.push(b'"');
    write_u64(token.into(), out);
    out.extend_from_slice(b"\":{\"logprob\":");
    write_logprob(logprob, out);
    out.extend_from_slice(b",\"rank\":");
    write_u64(rank.into(), out);
    out.extend_from_slice(b",\"decoded_token\":");
    write_str(&String::from_utf8_lossy(vocabulary.piece(token).bytes), out);
    out.push(b'}');
}
