//! Hides secrets in recorded facts.

use serde_json::Value;

/// The text in place of a secret.
pub(super) const MASK: &str = "***";

/// Masks a command line: `***` stands for the values of options that are named after secrets (token, password,
/// secret, key), for users and passwords of URLs, and for what follows `Authorization:`.
///
/// Tokens of a vocabulary, as in `--pad-token` and `--max-tokens`, are not secrets, nor are short numbers, as in
/// `--key 42`.
///
/// ```
/// use accelerator_track::internal::mask_arguments;
///
/// let line = ["train", "--lr", "0.1", "--api-key", "abc", "http://me:abc@host/x", "--eos-token", "</s>"];
/// let masked = ["train", "--lr", "0.1", "--api-key", "***", "http://***@host/x", "--eos-token", "</s>"];
/// assert_eq!(mask_arguments(&line), masked);
/// ```
#[must_use]
pub fn mask_arguments<S: AsRef<str>>(arguments: &[S]) -> Vec<String> {
    let mut awaited = None;
    let mask = |word: &S| {
        let word = word.as_ref();
        if let Some(secrecy) = awaited.take()
            && !word.starts_with("--")
        {
            return hide(secrecy, word);
        }
        if word.starts_with('-') && !word.contains('=') {
            awaited = Secrecy::of(word);
        }
        match word.split_once('=') {
            // All of the rest is the value, whatever it contains.
            Some((name, value)) if let Some(secrecy) = Secrecy::of(name) => {
                format!("{}={}", mask_text(name), hide(secrecy, value))
            }
            _ => mask_text(word),
        }
    };
    arguments.iter().map(mask).collect()
}

/// Masks every text in a value, whose words may be a command line.
pub(crate) fn mask_value(value: Value) -> Value {
    match value {
        Value::String(text) => {
            let text = mask_text(&text);
            let words: Vec<&str> = text.split(' ').collect();
            mask_arguments(&words).join(" ").into()
        }
        Value::Array(values) => {
            let words: Option<Vec<_>> = values.iter().map(Value::as_str).collect();
            match words {
                Some(words) => mask_arguments(&words).into(),
                None => values.into_iter().map(mask_value).collect(),
            }
        }
        Value::Object(fields) => {
            let fields = fields.into_iter();
            Value::Object(
                fields
                    .map(|(name, value)| (name, mask_value(value)))
                    .collect(),
            )
        }
        other => other,
    }
}

/// Masks users and passwords of URLs, secrets in their queries, and what follows
/// `Authorization:` or `Bearer`.
pub(super) fn mask_text(text: &str) -> String {
    let text = mask_users(text);
    let text = mask_queries(&text);
    let lower = text.to_ascii_lowercase();
    let header = ["authorization:", "bearer "];
    let end = header
        .into_iter()
        .filter_map(|word| Some(lower.find(word)? + word.len()));
    match end.min() {
        Some(end) => format!("{} {MASK}", text[..end].trim_end()),
        None => text,
    }
}

/// Returns true if a variable of this name may hold a secret.
pub(super) fn is_secret_variable(name: &str) -> bool {
    const PARTS: [&str; 7] = [
        "TOKEN",
        "PASS",
        "PWD",
        "SECRET",
        "KEY",
        "CREDENTIAL",
        "AUTH",
    ];
    let name = name.to_ascii_uppercase();
    PARTS.iter().any(|part| name.contains(part))
}

/// The condition on which the value of a name is secret.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Secrecy {
    Always,
    /// Programs have other values of this name, which are numbers.
    UnlessNumber,
}

impl Secrecy {
    /// Returns the secrecy of an option, a key or a parameter by its name.
    fn of(name: &str) -> Option<Self> {
        const ALWAYS: [&str; 7] = [
            "password",
            "passwd",
            "passphrase",
            "secret",
            "credential",
            "apikey",
            "privatekey",
        ];
        const MOSTLY: [&str; 5] = ["key", "accesskey", "pass", "pwd", "auth"];
        const OF_A_VOCABULARY: [&str; 9] = [
            "pad", "bos", "eos", "unk", "sep", "cls", "mask", "start", "stop",
        ];
        let words = words(name);
        let joined = words.concat();
        if ALWAYS.iter().any(|part| joined.contains(part)) {
            return Some(Self::Always);
        }
        let is_of_a_vocabulary = words.iter().any(|word| OF_A_VOCABULARY.contains(&&**word));
        let is_secret = |word: &String| {
            MOSTLY.contains(&&**word) || (word.ends_with("token") && !is_of_a_vocabulary)
        };
        words.iter().any(is_secret).then_some(Self::UnlessNumber)
    }
}

/// The words of a name in lower case: `--apiKey` and `api_key` have two.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in name.chars() {
        let begins = !c.is_alphanumeric() || (was_lower && c.is_uppercase());
        if begins {
            words.push(String::new());
        }
        if c.is_alphanumeric()
            && let Some(word) = words.last_mut()
        {
            word.extend(c.to_lowercase());
        }
        was_lower = c.is_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

fn hide(secrecy: Secrecy, value: &str) -> String {
    /// More digits may be a secret.
    const SHORT: usize = 6;
    let is_number = value.len() <= SHORT && value.parse::<f64>().is_ok_and(f64::is_finite);
    match secrecy {
        Secrecy::UnlessNumber if is_number => value.to_owned(),
        _ => MASK.to_owned(),
    }
}

/// Masks `user:password@` of URLs. A password that contains what should be escaped takes what stands before the last
/// `@` with it.
fn mask_users(text: &str) -> String {
    let Some(at) = text.find("://") else {
        return text.to_owned();
    };
    let (scheme, rest) = text.split_at(at + 3);
    let authority = rest.split(['/', '?', '#', ' ']).next().unwrap_or_default();
    let user = match authority.contains(':') {
        true => rest.rfind('@'),
        false => authority.rfind('@'),
    };
    match user {
        Some(end) if &rest[..end] != "git" => {
            format!("{scheme}{MASK}{}", mask_users(&rest[end..]))
        }
        _ => scheme.to_owned() + &mask_users(rest),
    }
}

/// Masks the values of `name=value` that are named after secrets, up to the next parameter.
fn mask_queries(text: &str) -> String {
    let mut masked = String::new();
    for part in text.split_inclusive(['?', '&', ';', '#', ',', ' ']) {
        let (pair, end) = match part.char_indices().next_back() {
            Some((at, '?' | '&' | ';' | '#' | ',' | ' ')) => part.split_at(at),
            _ => (part, ""),
        };
        match pair.split_once('=') {
            Some((name, value)) if let Some(secrecy) = Secrecy::of(name) => {
                masked.push_str(&format!("{name}={}", hide(secrecy, value)));
            }
            _ => masked.push_str(pair),
        }
        masked.push_str(end);
    }
    masked
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_models_and_optimizers_call_tokens_and_keys_stays() {
        for line in [
            "--max-tokens 512",
            "--tokenizer gpt2",
            "--tokens-per-batch=4096",
            "--pad-token <pad>",
            "--eos_token=</s>",
            "--key 42",
            "--keyboard=qwerty",
            "--token --verbose",
            "--passes 3",
            "--monkey x",
            "--author me",
            "--data s3://bucket/a?b=1",
            "http://localhost:5000/x",
            "ssh://git@host/a.git",
            "git@host:a/b.git",
            "--lr=1e-3",
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(mask_arguments(&words), words);
        }
    }

    #[test]
    fn secrets_are_found_where_they_stand() {
        for (line, expected) in [
            ("--hf-token hf_abc", "--hf-token ***"),
            ("-token abc", "-token ***"),
            ("TOKEN=abc", "TOKEN=***"),
            ("--apiKey abc", "--apiKey ***"),
            ("--password 12345", "--password ***"),
            ("--key 1234567", "--key ***"),
            (
                "--db postgres://me:p/w?d@h@host/db",
                "--db postgres://***@host/db",
            ),
            ("http://abc@host", "http://***@host"),
            (
                "http://h?a=1&access_token=abc&b=2",
                "http://h?a=1&access_token=***&b=2",
            ),
            ("opt.secret=a=b", "opt.secret=***"),
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(mask_arguments(&words).join(" "), expected);
        }
        let header = ["-H", "Authorization: Basic abc"];
        assert_eq!(mask_arguments(&header), ["-H", "Authorization: ***"]);
    }

    proptest! {
        #[test]
        fn no_secret_stays(
            name in "([qxz]{1,5}[-_.])?(token|password|secret|api[-_]?key|KEY|PASSWORD|secretKey)([-_.](file|value))?",
            secret in "[!-,.-~][!-~]{7,20}",
            others in prop::collection::vec("[a-z]{0,5}", 0..3),
        ) {
            // The letters that stand around it are not in it.
            let secret = format!("{secret}ß");
            let user = format!("https://me:{secret}@host/path");
            let query = format!("--url=http://host/a?{name}={}", secret.replace(['?', '&', ';', '#', ',', ' '], "+"));
            let lines = [
                vec![format!("--{name}={secret}")],
                vec![format!("{name}={secret}")],
                vec![format!("--{name}"), secret.clone()],
                vec![user.clone()],
                vec![format!("--uri={user}")],
                vec![query],
            ];
            for line in lines {
                let line: Vec<String> = others.iter().cloned().chain(line).collect();
                let masked = mask_arguments(&line);
                prop_assert_eq!(masked.len(), line.len());
                prop_assert!(!masked.concat().contains('ß'), "{:?}", masked);
                // Masked words stay as they are.
                prop_assert_eq!(&mask_arguments(&masked), &masked);
            }
            prop_assert!(!mask_text(&user).contains('ß'));
        }

        #[test]
        fn nothing_panics_and_plain_words_stay(words in prop::collection::vec(".*", 0..5), plain in "[a-z0-9/_.]{0,12}") {
            prop_assert_eq!(mask_arguments(&words).len(), words.len());
            prop_assert_eq!(mask_text(&plain), plain);
        }
    }
}
