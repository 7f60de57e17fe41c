use super::{Searcher, Suggestion};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::space::{Draw, Space};
use crate::trial_id::TrialId;

/// Suggests configurations at random, and every point of grids: Ray Tune's `BasicVariantGenerator`.
///
/// A space with grids is tried at each of their points once per sample; the first grid, by its path, varies fastest. What is
/// random is drawn again for each point. Every configuration follows from its number, so a grid of any size takes no
/// memory.
///
/// ```
/// use accelerator_tune::{Space, VariantGenerator, grid_search};
///
/// let grid = |options: [&str; 3]| grid_search(options.map(Into::into));
/// let space = Space::new([("x", grid(["1", "2", "3"])), ("y", grid(["a", "b", "c"]))]);
/// assert_eq!(VariantGenerator::new(&space, 2, 0)?.len(), 18);
/// # Ok::<(), accelerator_tune::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct VariantGenerator {
    space: Space,
    grids: Vec<(String, usize)>,
    points: Vec<Config>,
    /// How many configurations the space gives.
    variants: usize,
    samples: usize,
    seed: u64,
}

impl VariantGenerator {
    /// Of a space.
    ///
    /// # Errors
    /// [`Error::is_misuse`] where something of the space cannot be drawn.
    pub fn new(space: &Space, num_samples: u32, seed: u64) -> Result<Self> {
        space.check()?;
        let grids = space.grids();
        let samples = num_samples as usize;
        let mut sizes = grids.iter().map(|(_, options)| *options);
        let variants = sizes.try_fold(samples, usize::checked_mul);
        let variants = variants
            .filter(|count| u32::try_from(*count).is_ok())
            .ok_or_else(|| {
                Error::misuse("the grid has more than 2^32 points; draw some of them with `choice`")
            })?;
        Ok(Self {
            space: space.clone(),
            grids,
            points: Vec::new(),
            variants,
            samples,
            seed,
        })
    }

    /// Tries these first, each of them instead of a sample. What they do not name is drawn.
    #[must_use]
    pub fn with_points(mut self, points: &[Config]) -> Self {
        let points_to_try = points.len().min(self.samples);
        let per_sample = self.variants.checked_div(self.samples).unwrap_or(0);
        self.variants = points_to_try + (self.samples - points_to_try) * per_sample;
        self.points = points[..points_to_try].to_vec();
        self
    }

    /// How many configurations there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.variants
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.variants == 0
    }

    fn variant(&self, number: usize) -> Result<Config> {
        let mut rest = number;
        let grid = self.grids.iter().map(|(path, options)| {
            let option = rest % options;
            rest /= options;
            (path.clone(), option)
        });
        let grid: Vec<_> = grid.collect();
        self.space.draw(Draw {
            seed: self.seed,
            number: number as u64,
            grid: &grid,
        })
    }
}

impl Searcher for VariantGenerator {
    fn ask(&mut self, trial: TrialId) -> Result<Suggestion> {
        let number = trial.index();
        if number >= self.variants {
            return Ok(Suggestion::Exhausted);
        }
        let Some(point) = self.points.get(number) else {
            let config = self.variant(number - self.points.len())?;
            return Ok(Suggestion::Config(config));
        };
        let grid: Vec<_> = self
            .grids
            .iter()
            .map(|(path, _)| (path.clone(), 0))
            .collect();
        let mut config = self.space.draw(Draw {
            seed: self.seed,
            number: u64::MAX - number as u64,
            grid: &grid,
        })?;
        for (name, value) in point.as_map() {
            config.insert(name.clone(), value.clone());
        }
        Ok(Suggestion::Config(config))
    }

    fn is_adaptive(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn all(mut variants: VariantGenerator) -> Vec<Config> {
        let mut configs = Vec::new();
        while let Suggestion::Config(config) =
            variants.ask(TrialId::new(configs.len() as u32)).unwrap()
        {
            configs.push(config);
        }
        configs
    }

    fn grid() -> Space {
        serde_json::from_value(json!({
            "x": {"grid_search": [1, 2, 3]},
            "y": {"grid_search": ["a", "b", "c"]},
            "lr": {"uniform": [0.0, 1.0]},
        }))
        .unwrap()
    }

    #[test]
    fn a_grid_of_nine_is_tried_once_per_sample_and_its_first_variable_varies_fastest() {
        let configs = all(VariantGenerator::new(&grid(), 2, 0).unwrap());
        assert_eq!(configs.len(), 18);
        let points: Vec<_> = configs
            .iter()
            .map(|config| {
                format!(
                    "{}{}",
                    config.value("x").unwrap(),
                    config.value("y").unwrap()
                )
            })
            .collect();
        let expected = [
            "1\"a\"", "2\"a\"", "3\"a\"", "1\"b\"", "2\"b\"", "3\"b\"", "1\"c\"", "2\"c\"",
            "3\"c\"",
        ];
        assert_eq!(points[..9], expected);
        assert_eq!(points[9..], expected);
        let rates: std::collections::BTreeSet<_> = configs
            .iter()
            .map(|config| config.value("lr").unwrap().to_string())
            .collect();
        assert_eq!(rates.len(), 18, "random values are drawn for each point");
    }

    #[test]
    fn points_to_evaluate_replace_samples() {
        let space: Space = serde_json::from_value(
            json!({"lr": {"uniform": [0.0, 1.0]}, "b": {"uniform": [0.0, 1.0]}}),
        )
        .unwrap();
        let point: Config = serde_json::from_value(json!({"lr": 0.5})).unwrap();
        let variants = VariantGenerator::new(&space, 3, 0).unwrap();
        let configs = all(variants.with_points(&[point]));
        assert_eq!(configs.len(), 3);
        assert_eq!(configs[0].parse::<f64>("lr").unwrap(), 0.5);
        assert!(configs[0].value("b").is_some());
    }

    #[test]
    fn a_grid_of_a_million_points_is_not_made_in_advance() {
        let options: Vec<u32> = (0..1000).collect();
        let space: Space = serde_json::from_value(json!({
            "x": {"grid_search": options}, "y": {"grid_search": options}, "z": {"grid_search": [0, 1]},
        }))
        .unwrap();
        let mut variants = VariantGenerator::new(&space, 1, 0).unwrap();
        assert_eq!(variants.len(), 2_000_000);
        let Suggestion::Config(last) = variants.ask(TrialId::new(1_999_999)).unwrap() else {
            panic!("the last point is missing");
        };
        assert_eq!(last.to_string(), r#"{"x":999,"y":999,"z":1}"#);
    }
}
