use core::fmt;

/// A figure that is to fall in training, step by step.
#[derive(Clone, Debug, Default)]
pub struct Course(Vec<f64>);

impl Course {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes the figure of a step, where there was one.
    pub fn note(&mut self, figure: impl Into<Option<f64>>) {
        self.0.extend(figure.into());
    }

    /// The means over the first and the last tenth of the steps; `None` before the first step.
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
        let count = self.0.len().div_ceil(10);
        let mean = |figures: &[f64]| figures.iter().sum::<f64>() / count as f64;
        let (first, last) = (self.0.get(..count)?, &self.0[self.0.len() - count..]);
        (count > 0).then(|| (mean(first), mean(last)))
    }
}

impl fmt::Display for Course {
    /// With all digits, so that ranks can be compared.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tenths() {
            Some((first, last)) => write!(f, "{first} in the first tenth, {last} in the last"),
            None => f.write_str("no steps"),
        }
    }
}
