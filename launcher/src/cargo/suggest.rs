//! Targets to offer in the place of one that is not there.

/// How many targets an error lists.
const SUGGESTIONS: usize = 8;

/// A target that an error can offer instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Suggestion {
    /// Its name.
    pub(crate) name: String,
    /// How the error shows it.
    pub(crate) shown: String,
}

/// The targets whose names are most like `wanted`, the most alike first.
pub(crate) fn nearest(wanted: &str, mut known: Vec<Suggestion>) -> Vec<String> {
    known.sort_by(|one, other| {
        let nearness = |suggestion: &Suggestion| strsim::levenshtein(wanted, &suggestion.name);
        nearness(one)
            .cmp(&nearness(other))
            .then_with(|| one.shown.cmp(&other.shown))
    });
    known.dedup_by(|one, other| one.shown == other.shown);
    known
        .into_iter()
        .take(SUGGESTIONS)
        .map(|suggestion| suggestion.shown)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_comes_first() {
        let known = [
            "train",
            "mnist_plain",
            "mnist",
            "mnist",
            "regression",
            "u",
            "v",
            "w",
            "x",
            "y",
            "z",
        ];
        let known = known.map(|name| Suggestion {
            name: name.into(),
            shown: name.into(),
        });
        let near = nearest("mnits", known.to_vec());
        assert_ne!(near[1], "mnist", "each is listed once");
        assert_eq!(near[0], "mnist");
        assert_eq!(near.len(), SUGGESTIONS);
    }
}
