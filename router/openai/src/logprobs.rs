//! Log-probabilities as the worker measured them, and the three forms in which clients read them.

use std::borrow::Cow;

use plait_core::TokenId;
use plait_text::Vocabulary;
use serde::{Serialize, Serializer};

/// The least log-probability that is written: JSON has no infinity (vLLM's value).
const LOWEST_LOGPROB: f32 = -9999.0;

/// One token's log-probability, its rank, and the best of the vocabulary at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token itself, before temperature and filters.
    pub logprob: f32,
    /// From 1, in the whole vocabulary.
    pub rank: u32,
    /// The best tokens with their log-probabilities, best first; as many as the request asked for. Then the tokens that
    /// it named.
    pub best: Vec<(TokenId, f32)>,
}

impl TokenLogprobs {
    /// The tokens to list, each once.
    fn listed(&self) -> impl Iterator<Item = (TokenId, f32)> {
        let best = self.best.iter().enumerate();
        let firsts =
            best.filter(|(place, (id, _))| self.best[..*place].iter().all(|it| it.0 != *id));
        firsts.map(|(_, listed)| *listed)
    }
}

/// An output token with its log-probabilities.
#[derive(Clone, Debug)]
pub(crate) struct ScoredToken {
    pub(crate) token: TokenId,
    pub(crate) scores: TokenLogprobs,
}

/// A token's bytes as text, U+FFFD for what is not UTF-8.
fn spelling(vocabulary: &Vocabulary, token: TokenId) -> Cow<'_, str> {
    String::from_utf8_lossy(vocabulary.piece(token).bytes)
}

/// What tokens are called: their text, or `token_id:` and the id (vLLM's form).
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenNames<'a> {
    pub(crate) vocabulary: &'a Vocabulary,
    pub(crate) as_ids: bool,
}

impl<'a> TokenNames<'a> {
    fn name(self, token: TokenId) -> Cow<'a, str> {
        match self.as_ids {
            true => format!("token_id:{token}").into(),
            false => spelling(self.vocabulary, token),
        }
    }
}

/// A log-probability that JSON can hold.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob.max(LOWEST_LOGPROB)
    } else {
        LOWEST_LOGPROB
    }
}

/// OpenAI's form in chat: a list of tokens, each with the best at its position.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs<'a> {
    content: Vec<ScoredChatToken<'a>>,
    refusal: (),
}

#[derive(Debug, Serialize)]
struct ScoredChatToken<'a> {
    #[serde(flatten)]
    token: ChatToken<'a>,
    top_logprobs: Vec<ChatToken<'a>>,
}

#[derive(Debug, Serialize)]
struct ChatToken<'a> {
    token: Cow<'a, str>,
    logprob: f32,
    bytes: &'a [u8],
}

impl<'a> ChatLogprobs<'a> {
    /// `None` without tokens.
    pub(crate) fn of(names: TokenNames<'a>, tokens: &[ScoredToken]) -> Option<Self> {
        let spelled = |token: TokenId, logprob: f32| ChatToken {
            token: names.name(token),
            logprob: finite(logprob),
            bytes: names.vocabulary.piece(token).bytes,
        };
        let content = tokens.iter().map(|scored| ScoredChatToken {
            token: spelled(scored.token, scored.scores.logprob),
            top_logprobs: scored
                .scores
                .listed()
                .map(|(id, logprob)| spelled(id, logprob))
                .collect(),
        });
        (!tokens.is_empty()).then(|| Self {
            content: content.collect(),
            refusal: (),
        })
    }
}

/// OpenAI's form in completions: four lists side by side. A prompt's first token has no log-probability.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs<'a> {
    tokens: Vec<Cow<'a, str>>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopLogprobsByText<'a>>>,
    text_offset: Vec<u64>,
}

impl<'a> CompletionLogprobs<'a> {
    /// `None` without tokens. `num_chars` counts the characters of the tokens so far, over all chunks of
    /// a choice.
    pub(crate) fn of(
        names: TokenNames<'a>,
        tokens: &[ScoredToken],
        num_chars: &mut u64,
    ) -> Option<Self> {
        let mut lists = Self::default();
        for scored in tokens {
            let best = usize::MAX;
            lists.push(names, scored.token, Some(&scored.scores), best, num_chars);
        }
        (!tokens.is_empty()).then_some(lists)
    }

    /// Of a prompt, with `num_best` tokens at each position, and of the tokens after it.
    pub(crate) fn echoed(
        names: TokenNames<'a>,
        prompt: impl Iterator<Item = (TokenId, Option<&'a TokenLogprobs>)>,
        num_best: usize,
        tokens: &'a [ScoredToken],
    ) -> Self {
        let (mut lists, mut num_chars) = (Self::default(), 0);
        for (token, scores) in prompt {
            lists.push(names, token, scores, num_best, &mut num_chars);
        }
        for scored in tokens {
            let best = usize::MAX;
            lists.push(
                names,
                scored.token,
                Some(&scored.scores),
                best,
                &mut num_chars,
            );
        }
        lists
    }

    fn push(
        &mut self,
        names: TokenNames<'a>,
        token: TokenId,
        scores: Option<&TokenLogprobs>,
        num_best: usize,
        num_chars: &mut u64,
    ) {
        let text = spelling(names.vocabulary, token);
        self.text_offset.push(*num_chars);
        *num_chars += text.chars().count() as u64;
        self.token_logprobs
            .push(scores.map(|it| finite(it.logprob)));
        let best = scores.map(|it| TopLogprobsByText::of(names, token, it, num_best));
        self.top_logprobs.push(best);
        self.tokens.push(names.name(token));
    }
}

/// The best tokens and the token itself, by their text. Of two tokens with one text (pieces of
/// characters are all U+FFFD) the better one is listed.
#[derive(Debug)]
struct TopLogprobsByText<'a>(Vec<(Cow<'a, str>, f32)>);

impl<'a> TopLogprobsByText<'a> {
    fn of(names: TokenNames<'a>, token: TokenId, scores: &TokenLogprobs, num_best: usize) -> Self {
        let best = &scores.best[..num_best.min(scores.best.len())];
        let mut listed: Vec<(Cow<'a, str>, f32)> = Vec::with_capacity(best.len() + 1);
        for &(token, logprob) in best.iter().chain([&(token, scores.logprob)]) {
            let text = names.name(token);
            if listed.iter().all(|(other, _)| *other != text) {
                listed.push((text, finite(logprob)));
            }
        }
        Self(listed)
    }
}

impl Serialize for TopLogprobsByText<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// vLLM's form for prompts: null for the first token, then one object by token id for each. Written
/// token by token: a long prompt's objects would take hundreds of megabytes at once.
#[derive(Debug)]
pub(crate) struct PromptLogprobs<'a> {
    pub(crate) vocabulary: &'a Vocabulary,
    pub(crate) prompt: &'a [TokenId],
    pub(crate) scores: &'a [Option<TokenLogprobs>],
    /// Best tokens of each position that are listed.
    pub(crate) num_best: usize,
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let tokens = self.prompt.iter().zip(self.scores);
        serializer.collect_seq(tokens.map(|(&token, scores)| {
            let scores = scores.as_ref()?;
            Some(PromptToken {
                vocabulary: self.vocabulary,
                token,
                scores,
                num_best: self.num_best,
            })
        }))
    }
}

struct PromptToken<'a> {
    vocabulary: &'a Vocabulary,
    token: TokenId,
    scores: &'a TokenLogprobs,
    num_best: usize,
}

#[derive(Serialize)]
struct RankedToken<'a> {
    logprob: f32,
    rank: u32,
    decoded_token: Cow<'a, str>,
}

impl Serialize for PromptToken<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ranked = |token: TokenId, logprob: f32, rank: u32| {
            let ranked = RankedToken {
                logprob: finite(logprob),
                rank,
                decoded_token: spelling(self.vocabulary, token),
            };
            (token, ranked)
        };
        let own = ranked(self.token, self.scores.logprob, self.scores.rank);
        let best = (1..).zip(&self.scores.best).take(self.num_best);
        let others = best
            .filter(|(_, (token, _))| *token != self.token)
            .map(|(rank, &(token, logprob))| ranked(token, logprob, rank));
        serializer.collect_map(std::iter::once(own).chain(others))
    }
}
