//! Hugging Face folders: what is taken from them, and what is said of broken ones.

use plait_text::{Chat, ModelText};
use serde_json::{Map, Value, json};

use crate::model_folder::{Folder, byte_fallback, byte_level};

fn load_error(folder: &Folder) -> String {
    let error = ModelText::load(folder.path(), None).unwrap_err();
    error.to_string()
}

fn described(model: &ModelText) -> Value {
    serde_json::from_str(&model.describe(64)).unwrap()
}

#[test]
fn a_folder_describes_itself() {
    let folder = Folder::new(&byte_level());
    folder.write(
        "generation_config.json",
        r#"{"eos_token_id": [2, 9], "top_k": 4}"#,
    );
    let model = ModelText::load(folder.path(), Some("small")).unwrap();
    let expected = json!({
        "model_id": "small", "architecture": "llama", "max_model_len": 64, "vocab_size": 300,
        "eos_token_ids": [2, 9, 1],
        "generation_defaults":
            {"temperature": null, "top_p": null, "top_k": 4, "min_p": null,
             "presence_penalty": null, "frequency_penalty": null, "repetition_penalty": null},
    });
    assert_eq!(described(&model), expected);
    let name = folder.path().file_name().unwrap().to_string_lossy();
    assert_eq!(folder.load().model_id(), name);
}

#[test]
fn end_tokens_come_from_the_config_if_no_generation_config_has_them() {
    let folder = Folder::new(&byte_level());
    folder.write_config(&json!({"eos_token_id": [2, 1]}));
    assert_eq!(folder.load().eos_token_ids()[..], [2, 1]);
    folder.write_config(&json!({"eos_token_id": null}));
    assert_eq!(folder.load().eos_token_ids()[..], [1]);
}

#[test]
fn generation_defaults_out_of_the_apis_range_are_rejected_on_load() {
    let folder = Folder::new(&byte_level());
    folder.write_config(&json!({}));
    for (field, value) in [
        ("temperature", "1e39"),
        ("temperature", "-0.5"),
        ("top_p", "0"),
        ("top_p", "1.5"),
        ("min_p", "-1"),
        ("top_k", "-2"),
    ] {
        folder.write(
            "generation_config.json",
            &format!(r#"{{"{field}": {value}}}"#),
        );
        let error = load_error(&folder);
        assert!(
            error.contains(&format!("generation_config.json: {field} is ")),
            "{error}"
        );
        assert!(error.contains("leave it out"), "{error}");
    }
    folder.write(
        "generation_config.json",
        r#"{"top_k": -1, "top_p": 1, "temperature": 0}"#,
    );
    assert_eq!(folder.load().generation_defaults().top_k, Some(-1));
}

#[test]
fn yarn_stretches_the_context() {
    let folder = Folder::new(&byte_level());
    let rope = |factor: f64| json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 512});
    folder.write_config(&json!({"rope_scaling": rope(4.0)}));
    assert_eq!(folder.load().context_length(), 2048);
    folder.write_config(&json!({"rope_parameters": rope(0.5)}));
    assert_eq!(folder.load().context_length(), 512);
    folder.write_config(
        &json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0,
        "original_max_position_embeddings": 512}}),
    );
    assert_eq!(folder.load().context_length(), 512);
}

#[test]
fn a_vocabulary_of_an_unbelievable_size_is_rejected() {
    let folder = Folder::new(&byte_level());
    for num in [0_u32, u32::MAX] {
        folder.write_config(&json!({"vocab_size": num}));
        let error = load_error(&folder);
        assert!(
            error.contains(&format!("vocabulary has {num} tokens")),
            "{error}"
        );
    }
}

#[test]
fn folders_of_every_family_are_known_by_their_class() {
    let folder = Folder::new(&byte_level());
    for (class, own) in [
        ("Qwen2ForCausalLM", "qwen2"),
        ("MiniMaxM2ForCausalLM", "minimax_m2"),
        ("MistralForCausalLM", "mistral"),
    ] {
        folder.write_config(&json!({"architectures": [class]}));
        assert_eq!(described(&folder.load())["architecture"], own);
    }
}

#[test]
fn an_architecture_that_is_not_served_is_named_with_those_that_are() {
    let folder = Folder::new(&byte_level());
    folder.write_config(&json!({"architectures": ["GPT2LMHeadModel"]}));
    let error = load_error(&folder);
    assert!(
        error.contains("config.json: the architecture `GPT2LMHeadModel` is not"),
        "{error}"
    );
    assert!(
        error.contains("Qwen3ForCausalLM, Qwen3MoeForCausalLM, DeepseekV2ForCausalLM"),
        "{error}"
    );
}

#[test]
fn broken_and_missing_files_are_named() {
    let path = std::path::Path::new("/nowhere/at/all");
    let error = ModelText::load(path, None).unwrap_err().to_string();
    assert!(error.starts_with("/nowhere/at/all: "), "{error}");

    let folder = Folder::new(&byte_level());
    folder.write("config.json", "{");
    assert!(load_error(&folder).contains("config.json: cannot be read: EOF"));
    folder.write_config(&json!({"vocab_size": "many"}));
    assert!(load_error(&folder).contains("config.json: cannot be read: invalid type"));
    folder.write_config(&json!({}));
    folder.write("tokenizer.json", "{}");
    assert!(load_error(&folder).contains("tokenizer.json: is not a tokenizer"));
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    assert!(load_error(&folder).contains("tokenizer.json: is missing"));
    std::fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(load_error(&folder).contains("config.json: is missing"));
}

#[test]
fn a_tokenizer_that_makes_its_library_panic_is_a_broken_file() {
    let mut tokenizer = byte_level();
    tokenizer["model"] = json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]],
                                "continuing_subword_prefix": "####"});
    let error = load_error(&Folder::new(&tokenizer));
    assert!(
        error.contains("a library panicked; download it again"),
        "{error}"
    );
}

#[test]
fn a_decoder_without_a_known_inverse_is_rejected_by_name() {
    let mut tokenizer = byte_level();
    tokenizer["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let error = load_error(&Folder::new(&tokenizer));
    assert!(
        error.contains("decoder `WordPiece` is not supported"),
        "{error}"
    );
    let mut tokenizer = byte_fallback();
    tokenizer["decoder"]["decoders"]
        .as_array_mut()
        .unwrap()
        .swap(2, 3);
    let error = load_error(&Folder::new(&tokenizer));
    assert!(
        error.contains("decoder `Strip` is not supported"),
        "{error}"
    );
}

#[test]
fn a_broken_template_is_rejected_when_the_model_is_loaded() {
    let folder = Folder::new(&byte_level());
    folder.write("chat_template.jinja", "{% for %}");
    assert!(load_error(&folder).contains("chat template that is broken: syntax error"));
}

#[test]
fn templates_are_found_where_models_keep_them() {
    let folder = Folder::new(&byte_level());
    let prompt = |folder: &Folder| {
        let model = folder.load();
        let chat = Chat {
            tools: &[],
            documents: &[],
            messages: &[],
            kwargs: &Map::new(),
            add_generation_prompt: true,
            continue_final_message: false,
            reasoning_effort: None,
        };
        let prompt = model.render(chat, 100).unwrap().into_bytes();
        assert_eq!(prompt.len(), 1, "each of these templates writes one letter");
        prompt[0]
    };
    folder.write_tokenizer_config(&json!({"chat_template": [
        {"name": "tool_use", "template": "x"}, {"name": "default", "template": "a"}]}));
    let named = prompt(&folder);
    folder.write_tokenizer_config(&json!({"chat_template": "b"}));
    let single = prompt(&folder);
    folder.write("chat_template.jinja", "c");
    let own_file = prompt(&folder);
    assert_eq!([single - named, own_file - named], [1, 2]);
}
