//! Requests on their way in: what they become, and what is refused with which sentence.

use plait_openai::GenerateRequest;
use plait_text::ModelText;
use serde_json::{Value, json};

use crate::model_folder::{CONTEXT, Folder, byte_level};
use crate::support::{chat, completion, prepare, prepared};

fn model() -> ModelText {
    Folder::new(&byte_level()).load()
}

fn rejection(request: &GenerateRequest) -> (String, String) {
    let error = prepare(&model(), request).unwrap_err();
    (error.param.into_owned(), error.message)
}

fn with_generation_config(config: &Value) -> ModelText {
    let folder = Folder::new(&byte_level());
    folder.write("generation_config.json", &config.to_string());
    folder.load()
}

#[test]
fn openais_defaults_hold_where_nothing_else_is_said() {
    let (prompt, choice) = prepared(&model(), &chat(&json!({})));
    let sampling = choice.sampling;
    assert_eq!((sampling.temperature, sampling.top_k), (1.0, 0));
    assert_eq!((sampling.top_p, sampling.min_p), (1.0, 0.0));
    assert_eq!(sampling.seed, 7);
    assert_eq!(prompt.max_tokens, u32::MAX);
    assert_eq!(prompt.stop_ids[..], [1]);
    let (prompt, _) = prepared(&model(), &completion(&json!({})));
    assert_eq!(prompt.max_tokens, 16);
}

#[test]
fn the_models_defaults_yield_to_the_requests_own_values() {
    let model = with_generation_config(&json!({"temperature": 0.6, "top_k": 20, "top_p": 0.95}));
    let sampling = |changes| prepared(&model, &chat(&changes)).1.sampling;
    let default = sampling(json!({}));
    assert_eq!(
        (default.temperature, default.top_k, default.top_p),
        (f64::from(0.6_f32), 20, f64::from(0.95_f32))
    );
    let asked = sampling(json!({"sampling": {"temperature": 0.0, "top_k": 0}, "seed": -1}));
    assert_eq!(
        (asked.temperature, asked.top_k, asked.seed),
        (0.0, 0, u64::MAX)
    );
}

#[test]
fn a_request_without_changes_brings_none() {
    let neutral = json!({"sampling": {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1},
                         "logit_bias": {}, "bad_words": [], "min_tokens": 0});
    for fields in [json!({}), neutral] {
        let (prompt, choice) = prepared(&model(), &completion(&fields));
        assert_eq!((choice.adjustment, prompt.num_slot_words), (None, 0));
    }
}

#[test]
fn the_models_own_repetition_penalty_counts() {
    let model = with_generation_config(&json!({"repetition_penalty": 1.25}));
    let asked = |fields: Value| prepared(&model, &completion(&fields)).1.adjustment;
    let own = asked(json!({"prompts": [[9, 7, 9]]})).unwrap();
    assert_eq!(own.repetition_penalty, 1.25);
    assert_eq!(own.prompt_ids, [7, 9], "each token once");
    assert_eq!(
        asked(json!({"sampling": {"repetition_penalty": 1.0}})),
        None
    );
}

#[test]
fn changes_of_logits_arrive_as_the_worker_wants_them() {
    let fields = json!({
        "prompts": [[9, 7]], "sampling": {"presence_penalty": 0.5, "frequency_penalty": -2},
        "logit_bias": {"12": 1.5, "3": -100}, "min_tokens": 4, "stop_token_ids": [5],
        "allowed_token_ids": [12, 4, 12], "bad_words": ["he", " t"],
    });
    let (prompt, choice) = prepared(&model(), &completion(&fields));
    let it = choice.adjustment.unwrap();
    assert_eq!(
        (
            it.presence_penalty,
            it.frequency_penalty,
            it.repetition_penalty
        ),
        (0.5, -2.0, 1.0)
    );
    assert_eq!((it.min_tokens, &it.end_ids[..]), (4, &[1, 5][..]));
    assert!(
        it.prompt_ids.is_empty(),
        "only a repetition penalty counts the prompt"
    );
    let bias: Vec<(u32, f32)> = it.bias.iter().map(|it| (it.id, it.bias)).collect();
    assert_eq!(bias, [(3, -100.0), (12, 1.5)]);
    assert_eq!(it.allowed_ids, [4, 12]);
    let tokens = |text| model().encode(text, false, 9).unwrap();
    assert_eq!(it.bad_words, [tokens("he"), tokens(" t"), tokens("t")]);
    assert_eq!(prompt.num_slot_words as usize, it.num_words());
}

#[test]
fn end_tokens_that_are_ignored_wait_for_the_least_tokens_too() {
    let asked = json!({"min_tokens": 4, "ignore_eos": true, "stop_token_ids": [5]});
    let (prompt, choice) = prepared(&model(), &completion(&asked));
    assert_eq!(choice.adjustment.unwrap().end_ids, [1, 5]);
    assert_eq!(prompt.stop_ids[..], [5]);
}

#[test]
fn do_sample_false_means_greedy() {
    let model = with_generation_config(&json!({"do_sample": false, "temperature": 0.6}));
    let (_, choice) = prepared(&model, &chat(&json!({})));
    assert_eq!(choice.sampling.temperature, 0.0);
}

#[test]
fn stop_ids_join_the_end_tokens_unless_those_are_ignored() {
    let stop_ids = |changes| prepared(&model(), &chat(&changes)).0.stop_ids;
    assert_eq!(stop_ids(json!({"stop_token_ids": [9, 1]}))[..], [1, 9]);
    assert_eq!(
        stop_ids(json!({"stop_token_ids": [9], "ignore_eos": true}))[..],
        [9]
    );
    assert!(stop_ids(json!({"ignore_eos": true})).is_empty());
}

#[test]
fn only_completions_get_the_tokenizers_own_bos() {
    let folder = Folder::new(&byte_level());
    folder.write_tokenizer_config(&json!({
        "add_bos_token": true, "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }));
    let model = folder.load();
    let prompt = |request| prepared(&model, &request).0.prompt;
    let hi = model.encode("hi", false, usize::MAX).unwrap();
    let expected: Vec<u32> = [0].into_iter().chain(hi).collect();
    assert_eq!(prompt(chat(&json!({})))[..], expected);
    assert_eq!(prompt(completion(&json!({})))[..], expected);
}

#[test]
fn special_tokens_in_a_prompt_are_found() {
    let prompt = prepare(&model(), &completion(&json!({"prompts": ["<|user|>he"]}))).unwrap();
    assert_eq!(prompt.prompts[0].request.prompt[0], 2);
    assert_eq!(prompt.prompts[0].request.prompt.len(), 2);
}

#[test]
fn a_token_id_outside_the_vocabulary_is_rejected() {
    let (param, message) = rejection(&completion(&json!({"prompts": [[5, 300]]})));
    assert_eq!(param, "prompt");
    assert_eq!(
        message,
        "`prompt` has the token id 300, where 0 to 299 are allowed; send ids of this model's tokenizer"
    );
    assert_eq!(
        rejection(&chat(&json!({"stop_token_ids": [300]}))).0,
        "stop_token_ids"
    );
}

#[test]
fn prompt_and_max_tokens_must_fit_into_the_context() {
    let ids = |num: u32| json!([vec![5; num as usize]]);
    let fits = completion(&json!({"prompts": ids(CONTEXT - 4), "max_tokens": 4}));
    assert!(prepare(&model(), &fits).is_ok());
    let (param, message) = rejection(&completion(
        &json!({"prompts": ids(CONTEXT - 4), "max_tokens": 5}),
    ));
    assert_eq!(param, "max_tokens");
    assert!(
        message.contains("508 tokens and `max_tokens` is 5"),
        "{message}"
    );
    assert!(message.contains("at most 4"), "{message}");
    let (param, message) = rejection(&chat(&json!({"max_tokens": CONTEXT,
        "max_tokens_field": "max_completion_tokens"})));
    assert_eq!(param, "max_completion_tokens");
    assert!(
        message.contains("`max_completion_tokens` is 512"),
        "{message}"
    );
    // A completion that asks for nothing takes what is left.
    assert!(prepare(&model(), &completion(&json!({"prompts": ids(CONTEXT - 1)}))).is_ok());
    let (param, message) = rejection(&completion(&json!({"prompts": ids(CONTEXT)})));
    assert_eq!(param, "prompt");
    assert!(message.contains("shorten the prompt"), "{message}");
}

#[test]
fn an_output_that_leaves_no_room_is_refused_whatever_is_cut_of_the_prompt() {
    let asked = json!({"prompts": ["a b c"], "truncate_prompt_tokens": -1, "max_tokens": CONTEXT});
    let (param, message) = rejection(&completion(&asked));
    assert_eq!(param, "max_tokens");
    assert!(message.contains("ask for at most 511"), "{message}");
}

#[test]
fn text_that_cannot_fit_is_rejected_before_it_is_tokenised() {
    let long = "a".repeat(1 << 20);
    let (param, message) = rejection(&completion(&json!({"prompts": [long]})));
    assert_eq!(param, "prompt");
    assert!(
        message.contains("cannot fit into a context of 512 tokens"),
        "{message}"
    );
    let (param, message) = rejection(&chat(
        &json!({"messages": [{"role": "user", "content": long}]}),
    ));
    assert_eq!(param, "messages");
    assert!(
        message.contains("cannot fit into a context of 512 tokens"),
        "{message}"
    );
}

#[test]
fn a_stream_has_no_prompt_logprobs() {
    let (param, message) = rejection(&chat(&json!({"prompt_logprobs": 1})));
    assert_eq!(param, "prompt_logprobs");
    assert!(message.contains("send `stream`: false"), "{message}");
}

#[test]
fn prompt_log_probabilities_of_all_prompts_together_are_bounded() {
    let asked = |num_prompts: usize| {
        let prompts = vec![vec![2; 3_500]; num_prompts];
        let request =
            completion(&json!({"prompts": prompts, "prompt_logprobs": 20, "stream": false}));
        plait_openai::prepare(&model(), &request, 1 << 16, &mut || 7)
    };
    assert_eq!(asked(7).unwrap().prompts.len(), 7);
    let error = asked(8).unwrap_err();
    assert_eq!(error.param, "prompt_logprobs");
    assert!(error.message.contains("588000"), "{error}");
}

#[test]
fn a_template_can_reject_a_chat_in_its_own_words() {
    let folder = Folder::new(&byte_level());
    folder.write(
        "chat_template.jinja",
        "{{ raise_exception('roles must alternate') }}",
    );
    let error = prepare(&folder.load(), &chat(&json!({}))).unwrap_err();
    assert_eq!(error.param, "messages");
    assert_eq!(
        error.message,
        "the chat template rejects these messages: roles must alternate; send others"
    );
}

#[test]
fn a_template_that_runs_forever_is_stopped() {
    let folder = Folder::new(&byte_level());
    let source = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    folder.write("chat_template.jinja", source);
    let error = prepare(&folder.load(), &chat(&json!({}))).unwrap_err();
    assert!(error.message.contains("runs too long"), "{}", error.message);
}

#[test]
fn a_template_that_makes_its_library_panic_does_not_end_the_thread() {
    let folder = Folder::new(&byte_level());
    folder.write("chat_template.jinja", "{{ ''[::-1] }}");
    let _ = prepare(&folder.load(), &chat(&json!({})));
}

#[test]
fn callers_may_set_the_templates_own_variables_only() {
    let folder = Folder::new(&byte_level());
    folder.write("chat_template.jinja", "{{ mood }}");
    let model = folder.load();
    let asked = |kwargs| prepare(&model, &chat(&json!({"chat_template_kwargs": kwargs})));
    let prompt = asked(json!({"mood": "good"}))
        .unwrap()
        .prompts
        .remove(0)
        .request
        .prompt;
    assert_eq!(prompt[..], model.encode("good", false, usize::MAX).unwrap());
    assert_eq!(
        asked(json!({"messages": []})).unwrap_err().param,
        "chat_template_kwargs.messages"
    );
}

#[test]
fn a_model_without_a_template_takes_completions_only() {
    let folder = Folder::new(&byte_level());
    folder.write_tokenizer_config(&json!({}));
    let model = folder.load();
    let error = prepare(&model, &chat(&json!({}))).unwrap_err();
    assert!(
        error.message.contains("use /v1/completions"),
        "{}",
        error.message
    );
    assert!(prepare(&model, &completion(&json!({}))).is_ok());
}

#[test]
fn text_with_tokens_that_the_model_has_no_row_for_is_rejected() {
    let folder = Folder::new(&byte_level());
    folder.write_config(&json!({"vocab_size": 260}));
    let error = prepare(&folder.load(), &completion(&json!({"prompts": [" t"]}))).unwrap_err();
    assert!(
        error.message.contains("has the token id 260"),
        "{}",
        error.message
    );
}

#[test]
fn top_k_minus_one_and_zero_keep_the_whole_vocabulary() {
    for (given, meant) in [(-1, 0), (0, 0), (1, 1)] {
        let request = chat(&json!({"sampling": {"top_k": given}}));
        let sampling = prepare(&model(), &request).unwrap().prompts[0].choices[0].sampling;
        assert_eq!(sampling.top_k, meant);
    }
}

#[test]
fn a_negative_seed_is_its_bits_without_a_sign() {
    for (given, meant) in [
        (0, 0),
        (-1, u64::MAX),
        (i64::MIN, 1 << 63),
        (i64::MAX, (1 << 63) - 1),
    ] {
        let prepared = prepare(&model(), &chat(&json!({"seed": given}))).unwrap();
        assert_eq!(prepared.prompts[0].choices[0].sampling.seed, meant);
    }
}

#[test]
fn an_error_says_what_was_given_what_is_allowed_and_what_to_do() {
    let (_, message) = rejection(&chat(&json!({"sampling": {"temperature": 300}})));
    let expected = "`temperature` is 300, where 0 to 100 is allowed; send that or leave it out";
    assert_eq!(message, expected);
}

#[test]
fn a_client_cannot_replace_the_templates_own_names() {
    let names = [
        "messages",
        "tools",
        "documents",
        "tokenize",
        "chat_template",
        "raise_exception",
        "strftime_now",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
    ];
    for name in names {
        let (param, message) = rejection(&chat(&json!({"chat_template_kwargs": {name: 1}})));
        assert_eq!(param, format!("chat_template_kwargs.{name}"));
        assert!(message.ends_with("leave it out"), "{message}");
    }
}
