use core::fmt;

use accelerator::Accelerator;

/// The course of a value that training should reduce, step by step.
#[derive(Clone, Debug, Default)]
pub struct Course {
    figures: Vec<f64>,
    run: Option<(Accelerator, String)>,
}

impl Course {
    /// Creates an empty course.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a course that logs each value as `kind/loss` if there is a run.
    #[must_use]
    pub fn tracked(accelerator: &Accelerator, kind: &str) -> Self {
        Self {
            figures: Vec::new(),
            run: Some((accelerator.clone(), kind.to_owned())),
        }
    }

    /// Appends the value of a step; ignores `None`.
    pub fn note(&mut self, figure: impl Into<Option<f64>>) {
        let Some(figure) = figure.into() else {
            return;
        };
        self.figures.push(figure);
        if let Some((accelerator, kind)) = &self.run {
            let step = self.figures.len() as u64;
            accelerator.log(kind, [("loss", figure)], step, None);
        }
    }

    /// Returns the means over the first and the last tenth of the steps; `None` before the first step.
    ///
    /// ```
    /// use accelerator_examples::Course;
    ///
    /// let mut course = Course::new();
    /// assert_eq!(course.tenths(), None);
    /// (0..20).for_each(|step| course.note(f64::from(20 - step)));
    /// assert_eq!(course.tenths(), Some((19.5, 1.5)));
    /// assert_eq!(course.to_string(), "19.5 in the first tenth, 1.5 in the last");
    /// ```
    #[must_use]
    pub fn tenths(&self) -> Option<(f64, f64)> {
        let count = self.figures.len().div_ceil(10);
        let mean = |figures: &[f64]| figures.iter().sum::<f64>() / count as f64;
        let first = self.figures.get(..count)?;
        let last = &self.figures[self.figures.len() - count..];
        (count > 0).then(|| (mean(first), mean(last)))
    }
}

impl fmt::Display for Course {
    /// Writes all digits, so that ranks can be compared.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tenths() {
            Some((first, last)) => write!(f, "{first} in the first tenth, {last} in the last"),
            None => f.write_str("no steps"),
        }
    }
}
