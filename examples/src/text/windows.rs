use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::bundled::BUNDLED;
use crate::error::{Error, Kind, Result};

/// The characters of a text, sorted by code point. A character's index is its token.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Vocabulary(Vec<char>);

impl Vocabulary {
    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no tokens, as for an empty text.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the tokens of a text, without unknown characters.
    ///
    /// ```
    /// use accelerator_examples::text::TextWindows;
    ///
    /// let (_, vocabulary) = TextWindows::new("hello there", 4).unwrap();
    /// let tokens = vocabulary.tokens("the hero!");
    /// assert_eq!(vocabulary.text(&tokens), "the hero");
    /// ```
    #[must_use]
    pub fn tokens(&self, text: &str) -> Vec<usize> {
        text.chars()
            .filter_map(|character| self.0.binary_search(&character).ok())
            .collect()
    }

    /// Returns the text of tokens.
    #[must_use]
    pub fn text(&self, tokens: &[usize]) -> String {
        tokens
            .iter()
            .filter_map(|&token| self.0.get(token))
            .collect()
    }
}

/// The windows of a text, each of which begins half a window after the one before it. A sample is a window and the
/// character that follows it.
#[derive(Clone, Debug)]
pub struct TextWindows {
    length: usize,
    tokens: Arc<[usize]>,
}

impl TextWindows {
    /// Cuts the text into windows of `length` characters.
    ///
    /// # Errors
    ///
    /// [`Error::is_settings`] if `length` is 0, or the text is not longer than that.
    pub fn new(text: &str, length: usize) -> Result<(Self, Vocabulary)> {
        let characters: BTreeSet<char> = text.chars().collect();
        let vocabulary = Vocabulary(characters.into_iter().collect());
        let tokens: Arc<[usize]> = vocabulary.tokens(text).into();
        if length == 0 || tokens.len() <= length {
            return Err(Error::new(
                Kind::Settings,
                format!(
                    "the text has {} characters; expected more than the length of a sample, {length}",
                    tokens.len()
                ),
            ));
        }
        Ok((Self { length, tokens }, vocabulary))
    }

    /// Reads the text of a file, or takes the bundled one, for [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// [`Error::is_io`] if the file cannot be read as UTF-8, and the errors of `new`.
    pub fn open(path: Option<&Path>, length: usize) -> Result<(Self, Vocabulary)> {
        match path {
            None => Self::new(BUNDLED, length),
            Some(path) => {
                let text = std::fs::read_to_string(path);
                Self::new(
                    &text.map_err(|error| Error::io("read", path, error))?,
                    length,
                )
            }
        }
    }

    fn step(&self) -> usize {
        self.length.div_ceil(2)
    }
}

impl Dataset<Vec<usize>> for TextWindows {
    fn get(&self, index: usize) -> Result<Vec<usize>, DatasetError> {
        let start = index * self.step();
        Ok(self.tokens[start..start + self.length + 1].to_vec())
    }

    fn len(&self) -> usize {
        (self.tokens.len() - self.length - 1) / self.step() + 1
    }
}

/// Windows of text, and the character that follows each of theirs.
#[derive(Clone, Debug)]
pub struct TextBatch {
    /// `[batch, length]`.
    pub tokens: Tensor<2, Int>,
    /// `[batch · length]`.
    pub next: Tensor<1, Int>,
}

impl TextBatch {
    /// Returns the number of tokens that the loss is a mean over.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.next.dims()[0]
    }
}

/// Makes a [`TextBatch`] of windows and the character that follows each.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextBatcher;

impl Batcher<Vec<usize>, TextBatch> for TextBatcher {
    fn batch(&self, items: Vec<Vec<usize>>, device: &Device) -> TextBatch {
        let (count, length) = (items.len(), items[0].len() - 1);
        let part = |from: usize| -> Vec<i64> {
            let tokens = items.iter().flat_map(|item| &item[from..from + length]);
            tokens.map(|&token| token as i64).collect()
        };
        TextBatch {
            tokens: Tensor::from_data(TensorData::new(part(0), [count, length]), device),
            next: Tensor::from_data(TensorData::new(part(1), [count * length]), device),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_is_in_a_sample_and_is_followed_by_the_next() {
        let (windows, vocabulary) = TextWindows::new("abcdefghij", 4).unwrap();
        assert_eq!((vocabulary.len(), windows.len()), (10, 3));
        let samples: Vec<_> = (0..3).map(|index| windows.get(index).unwrap()).collect();
        let of = |from: usize| (from..from + 5).collect::<Vec<_>>();
        assert_eq!(samples, [of(0), of(2), of(4)]);
        let batch = TextBatcher.batch(samples, &Device::default());
        assert_eq!((batch.tokens.dims(), batch.tokens()), ([3, 4], 12));
        let next = batch.next.into_data().convert::<i64>();
        assert_eq!(next.try_to_vec::<i64>().unwrap()[3..6], [4, 3, 4]);
    }

    #[test]
    fn a_text_that_is_too_short_is_an_error() {
        assert!(TextWindows::new("abcd", 4).unwrap_err().is_settings());
        assert!(TextWindows::new("", 0).is_err());
        assert_eq!(TextWindows::new("abcde", 4).unwrap().0.len(), 1);
    }

    #[test]
    fn the_text_that_comes_along_is_long_enough() {
        let (windows, vocabulary) = TextWindows::open(None, 64).unwrap();
        assert!(windows.len() > 40 && vocabulary.len() < 60);
    }
}
