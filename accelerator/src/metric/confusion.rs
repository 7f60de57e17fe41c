use core::fmt;

use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};

use super::{Metric, Sums};
use crate::core::error::{Error, Result};

/// A confusion matrix: the number of samples for each pair of class and answer of the model. It gives accuracy,
/// precision, recall and F1.
///
/// A figure of a class of which there is nothing to tell (a recall of a class without samples, a
/// precision of one that was never the answer) is 0, as in scikit-learn; averages over classes count
/// it.
///
/// ```
/// use accelerator::metric::Confusion;
///
/// let mut confusion = Confusion::new(3);
/// confusion.count(&[0, 0, 1, 2, 2, 2], &[0, 1, 1, 2, 2, 0])?;
/// assert_eq!(confusion.of(2, 0), 1);
/// assert_eq!(confusion.recall(2), 2.0 / 3.0);
/// assert_eq!(confusion.precision(0), 0.5);
/// assert_eq!(confusion.accuracy(), 4.0 / 6.0);
/// println!("{confusion}");
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(try_from = "Counts")]
pub struct Confusion {
    classes: usize,
    /// The counts by class of the sample, and within it by answer.
    counts: Vec<f64>,
}

impl Confusion {
    /// Makes an empty matrix of `classes` classes.
    pub fn new(classes: usize) -> Self {
        Self {
            classes,
            counts: vec![0.0; classes * classes],
        }
    }

    /// Counts the first `samples` rows of `logits` (`[rows, classes]`), whose highest is the answer,
    /// against `targets` (`[rows]`). Pass [`Batch::real`](crate::data::Batch::real), which leaves
    /// padding out.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] if a target is no class; nothing is counted then.
    pub fn update(
        &mut self,
        logits: Tensor<2>,
        targets: Tensor<1, Int>,
        samples: usize,
    ) -> Result<()> {
        if samples == 0 {
            return Ok(());
        }
        let answers = logits.narrow(0, 0, samples).argmax(1).flatten::<1>(0, 1);
        let (answers, targets) = (numbers(answers)?, numbers(targets.narrow(0, 0, samples))?);
        self.count(&targets, &answers)
    }

    /// Counts samples by class and answer.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] if there are more of the one than of the other, or one is no class;
    /// nothing is counted then.
    pub fn count(&mut self, targets: &[i64], answers: &[i64]) -> Result<()> {
        if targets.len() != answers.len() {
            return Err(Error::misuse(format!(
                "Confusion: expected an answer for each of {} targets, found {}",
                targets.len(),
                answers.len()
            )));
        }
        let known = |class: &i64| usize::try_from(*class).is_ok_and(|class| class < self.classes);
        if let Some(stranger) = targets.iter().chain(answers).find(|class| !known(class)) {
            return Err(Error::misuse(format!(
                "Confusion: expected classes from 0 to {}, found {stranger}; give \
                 `Confusion::new` the number of all classes",
                self.classes as i64 - 1
            )));
        }
        for (&target, &answer) in targets.iter().zip(answers) {
            self.counts[target as usize * self.classes + answer as usize] += 1.0;
        }
        Ok(())
    }

    /// Returns how many samples of class `target` got `answer`; 0 if there is no such class.
    pub fn of(&self, target: usize, answer: usize) -> u64 {
        self.entry(target, answer) as u64
    }

    /// Returns the number of samples counted.
    pub fn samples(&self) -> u64 {
        self.counts.iter().sum::<f64>() as u64
    }

    /// Returns the share of right answers, from 0 to 1; NaN without samples.
    pub fn accuracy(&self) -> f64 {
        self.each(|class| self.entry(class, class)) / self.counts.iter().sum::<f64>()
    }

    /// Returns the share of the samples with this answer for which it was right.
    pub fn precision(&self, class: usize) -> f64 {
        share(self.entry(class, class), self.predicted(class))
    }

    /// Returns the share of the samples of this class that got the right answer.
    pub fn recall(&self, class: usize) -> f64 {
        share(self.entry(class, class), self.actual(class))
    }

    /// Returns the harmonic mean of precision and recall of a class.
    pub fn f1(&self, class: usize) -> f64 {
        let right = self.entry(class, class);
        share(2.0 * right, self.actual(class) + self.predicted(class))
    }

    /// Returns the mean F1 of the classes, with equal weights.
    ///
    /// ```
    /// use accelerator::metric::Confusion;
    ///
    /// let mut confusion = Confusion::new(2);
    /// // It always says 0, and three of four samples are.
    /// confusion.count(&[0, 0, 0, 1], &[0, 0, 0, 0])?;
    /// assert_eq!((confusion.samples(), confusion.accuracy()), (4, 0.75));
    /// assert_eq!((confusion.f1(0), confusion.f1(1)), (6.0 / 7.0, 0.0));
    /// assert_eq!(confusion.macro_f1(), 3.0 / 7.0);
    /// # Ok::<(), accelerator::Error>(())
    /// ```
    pub fn macro_f1(&self) -> f64 {
        self.each(|class| self.f1(class)) / self.classes as f64
    }

    fn macro_precision(&self) -> f64 {
        self.each(|class| self.precision(class)) / self.classes as f64
    }

    fn macro_recall(&self) -> f64 {
        self.each(|class| self.recall(class)) / self.classes as f64
    }

    fn entry(&self, target: usize, answer: usize) -> f64 {
        if target >= self.classes || answer >= self.classes {
            return 0.0;
        }
        self.counts[target * self.classes + answer]
    }

    fn actual(&self, class: usize) -> f64 {
        self.each(|answer| self.entry(class, answer))
    }

    /// Returns the number of samples predicted to be of a class.
    fn predicted(&self, class: usize) -> f64 {
        self.each(|target| self.entry(target, class))
    }

    fn each(&self, figure: impl Fn(usize) -> f64) -> f64 {
        (0..self.classes).map(figure).sum()
    }
}

/// A line for each class and one of their means.
impl fmt::Display for Confusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>8} {:>9} {:>9} {:>9} {:>9}",
            "class", "precision", "recall", "F1", "samples"
        )?;
        for class in 0..self.classes {
            writeln!(
                f,
                "{class:>8} {:>9.4} {:>9.4} {:>9.4} {:>9}",
                self.precision(class),
                self.recall(class),
                self.f1(class),
                self.actual(class)
            )?;
        }
        write!(
            f,
            "{:>8} {:>9.4} {:>9.4} {:>9.4} {:>9}",
            "mean",
            self.macro_precision(),
            self.macro_recall(),
            self.macro_f1(),
            self.samples()
        )
    }
}

impl Metric for Confusion {
    fn sums(&mut self, sums: &mut Sums<'_>) {
        sums.all(&mut self.counts);
    }
}

/// The serialized form, before it is checked.
#[derive(Deserialize)]
struct Counts {
    classes: usize,
    counts: Vec<f64>,
}

impl TryFrom<Counts> for Confusion {
    type Error = Error;

    fn try_from(Counts { classes, counts }: Counts) -> Result<Self> {
        if classes.checked_mul(classes) == Some(counts.len()) {
            return Ok(Self { classes, counts });
        }
        Err(Error::misuse(format!(
            "Confusion: expected a count for each pair of {classes} classes, found {}; read what was \
             written from a `Confusion`",
            counts.len()
        )))
    }
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn numbers(tensor: Tensor<1, Int>) -> Result<Vec<i64>> {
    tensor
        .into_data()
        .convert::<i64>()
        .try_to_vec::<i64>()
        .map_err(|error| Error::misuse(format!("Confusion: classes are whole numbers: {error:?}")))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-12, "{found} != {expected}");
    }

    /// Figures of scikit-learn's `precision_recall_fscore_support` for the same labels.
    #[test]
    fn figures_are_those_of_the_definitions() {
        let mut confusion = Confusion::new(4);
        confusion
            .count(&[0, 1, 2, 0, 1, 2], &[0, 2, 1, 0, 0, 1])
            .unwrap();
        close(confusion.accuracy(), 2.0 / 6.0);
        close(confusion.precision(0), 2.0 / 3.0);
        close(confusion.recall(0), 1.0);
        close(confusion.f1(0), 0.8);
        // A class that is never right, and one that is not there at all.
        for class in [1, 3, 7] {
            close(confusion.precision(class), 0.0);
            close(confusion.recall(class), 0.0);
            close(confusion.f1(class), 0.0);
        }
        close(confusion.macro_f1(), 0.2);
        close(confusion.macro_recall(), 0.25);
        assert_eq!((confusion.of(1, 2), confusion.of(2, 1)), (1, 2));
        let text = confusion.to_string();
        assert!(
            text.lines().count() == 6 && text.contains("0.8000"),
            "{text}"
        );
    }

    #[test]
    fn what_was_written_comes_back_and_nothing_else() {
        let mut confusion = Confusion::new(2);
        confusion.count(&[0, 1, 1], &[0, 1, 0]).unwrap();
        let mut text = serde_json::to_string(&confusion).unwrap();
        let back: Confusion = serde_json::from_str(&text).unwrap();
        assert_eq!(back, confusion);
        text = text.replace("\"classes\":2", "\"classes\":3");
        let error = serde_json::from_str::<Confusion>(&text).unwrap_err();
        assert!(error.to_string().contains("3 classes, found 4"), "{error}");
    }

    #[test]
    fn padding_is_left_out() {
        let device = Device::flex();
        let logits = Tensor::from_floats([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], &device);
        let targets = Tensor::<1, Int>::from_ints([0, 0, 1], &device);
        let mut confusion = Confusion::new(2);
        confusion
            .update(logits.clone(), targets.clone(), 2)
            .unwrap();
        confusion.update(logits, targets, 0).unwrap();
        assert_eq!(confusion.samples(), 2);
        assert_eq!((confusion.of(0, 0), confusion.of(0, 1)), (1, 1));
    }

    #[test]
    fn a_stranger_is_named_and_nothing_counted() {
        let mut confusion = Confusion::new(2);
        for (targets, answers) in [([0, 2], [0, 0]), ([0, 0], [1, -1])] {
            let error = confusion.count(&targets, &answers).unwrap_err();
            assert!(
                error.is_misuse() && error.to_string().contains("0 to 1"),
                "{error}"
            );
        }
        assert!(confusion.count(&[0], &[]).unwrap_err().is_misuse());
        assert_eq!(confusion.samples(), 0);
        assert!(confusion.accuracy().is_nan());
    }
}
