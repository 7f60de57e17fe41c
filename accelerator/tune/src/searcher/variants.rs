use std::fmt::Display;

use super::Searcher;
use crate::config::{Config, TrialId};
use crate::error::{Error, Result};
use crate::space::{Draw, Space};

/// Suggests configurations at random, and every point of grids: Ray Tune's `BasicVariantGenerator`.
///
/// A space with grids is tried at each of their points once per sample; the first grid, by its path, varies fastest. What is
/// random is drawn again for each point. Every configuration follows from its number, so a grid of any size takes no
/// memory.
#[derive(Clone, Debug)]
pub(crate) struct VariantGenerator {
    /// The part of the space at each of the points to try first.
    points: Vec<Variants>,
    rest: Variants,
    samples: usize,
    count: usize,
    seed: u64,
}

/// A part of a space that is tried once per sample.
#[derive(Clone, Debug)]
struct Variants {
    space: Space,
    grids: Vec<(String, usize)>,
}

impl VariantGenerator {
    /// Creates a generator of the configurations of a space.
    ///
    /// # Errors
    /// [`Error::is_misuse`] where something of the space cannot be drawn.
    pub(crate) fn new(space: &Space, num_samples: u32, seed: u64) -> Result<Self> {
        space.check()?;
        let variants = Self {
            points: Vec::new(),
            rest: Variants::of(space.clone()),
            samples: num_samples as usize,
            count: 0,
            seed,
        };
        variants.counted()
    }

    /// Sets points of the space to try first. Each replaces a sample, and all are tried. Parameters that a point does
    /// not set are drawn, and tried at each option of a grid.
    ///
    /// # Errors
    /// [`Error::is_misuse`] if a point names what is no parameter, or a value that the parameter never has; the errors of
    /// what is computed from other values, such as by `sample_from`.
    pub(crate) fn with_points(mut self, points: &[Config]) -> Result<Self> {
        let at_point = |(number, point)| match self.rest.space.at_point(point) {
            Ok(space) => Ok(Variants::of(space)),
            Err(misfit) => Err(of_point(number, &misfit)),
        };
        self.points = points
            .iter()
            .enumerate()
            .map(at_point)
            .collect::<Result<_>>()?;
        let variants = self.counted()?;
        // What is computed from other values may refuse the point's, and is known when it is drawn.
        let mut first = 0;
        for point in 0..variants.points.len() {
            let count = variants.points[point].count().unwrap_or(0);
            if count > 0 {
                variants.suggest(first)?;
            }
            first += count;
        }
        Ok(variants)
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    fn suggest(&self, number: usize) -> Result<Config> {
        let mut variant = number;
        for (index, point) in self.points.iter().enumerate() {
            // What does not fit into memory was refused.
            let count = point.count().unwrap_or(0);
            if variant < count {
                // Away from the numbers of the others.
                let config = point.draw(variant, self.seed, u64::MAX - number as u64);
                return config.map_err(|error| of_point(index, &error));
            }
            variant -= count;
        }
        self.rest.draw(variant, self.seed, variant as u64)
    }

    fn counted(mut self) -> Result<Self> {
        let others = self.samples.saturating_sub(self.points.len());
        let others = self.rest.count().and_then(|each| each.checked_mul(others));
        let mut of_points = self.points.iter().map(Variants::count);
        let count = of_points.try_fold(others, |sum, more| Some(sum?.checked_add(more?)));
        self.count = count
            .flatten()
            .filter(|count| u32::try_from(*count).is_ok())
            .ok_or_else(|| {
                Error::misuse("the grid has more than 2^32 points; draw some of them with `choice`")
            })?;
        Ok(self)
    }
}

impl Variants {
    fn of(space: Space) -> Self {
        let grids = space.grids();
        Self { space, grids }
    }

    fn count(&self) -> Option<usize> {
        let mut sizes = self.grids.iter().map(|(_, options)| *options);
        sizes.try_fold(1, usize::checked_mul)
    }

    /// Draws the variant of that number, for any sample; randomness depends on the number of the draw.
    fn draw(&self, variant: usize, seed: u64, number: u64) -> Result<Config> {
        let mut rest = variant;
        let grid = self.grids.iter().map(|(path, options)| {
            let option = rest % options;
            rest /= options;
            (path.clone(), option)
        });
        let grid: Vec<_> = grid.collect();
        self.space.draw(Draw {
            seed,
            number,
            grid: &grid,
        })
    }
}

impl Searcher for VariantGenerator {
    fn ask(&mut self, trial: TrialId) -> Result<Option<Config>> {
        let number = Some(trial.index()).filter(|number| *number < self.count);
        number.map(|number| self.suggest(number)).transpose()
    }

    fn is_adaptive(&self) -> bool {
        false
    }
}

fn of_point(number: usize, error: &dyn Display) -> Error {
    Error::misuse(format!("`points_to_evaluate[{number}]`: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn all(variants: VariantGenerator) -> Vec<Config> {
        suggested(variants).unwrap()
    }

    fn suggested(mut variants: VariantGenerator) -> Result<Vec<Config>> {
        let mut configs = Vec::new();
        while let Some(config) = variants.ask(TrialId::new(configs.len() as u32))? {
            configs.push(config);
        }
        Ok(configs)
    }

    const WHOLE_GRID: [&str; 9] = ["1a", "2a", "3a", "1b", "2b", "3b", "1c", "2c", "3c"];

    /// Returns the points of the grid.
    fn shown(configs: &[Config]) -> Vec<String> {
        let shown = |config: &Config| {
            let x: u32 = config.parse("x").unwrap();
            x.to_string() + &config.parse::<String>("y").unwrap()
        };
        configs.iter().map(shown).collect()
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
        let points = shown(&configs);
        assert_eq!(points[..9], WHOLE_GRID);
        assert_eq!(points[9..], WHOLE_GRID);
        let rates: std::collections::BTreeSet<_> = configs
            .iter()
            .map(|config| config.value("lr").unwrap().to_string())
            .collect();
        assert_eq!(rates.len(), 18, "random values are drawn for each point");
    }

    fn of(space: serde_json::Value) -> Space {
        serde_json::from_value(space).unwrap()
    }

    fn at(space: &Space, samples: u32, points: serde_json::Value) -> Result<Vec<Config>> {
        let points: Vec<Config> = serde_json::from_value(points).unwrap();
        let variants = VariantGenerator::new(space, samples, 0)?;
        suggested(variants.with_points(&points)?)
    }

    fn optimizers() -> Space {
        of(json!({
            "wd": 0.1,
            "betas": [0.9, {"uniform": [0.9, 1.0]}],
            "opt": {"choice": [{"name": "sgd", "momentum": {"uniform": [0.1, 0.9]}, "lr": {"uniform": [0.0, 1.0]}},
                {"name": "adam", "lr": {"uniform": [0.0, 1.0]}}, {"name": "none"}]},
            "steps": {"randint": [1, 5]},
            "width": {"sample_from": {"of": "opt/name", "cases": {"sgd": 64}, "otherwise": {"randint": [8, 16]}}},
        }))
    }

    #[test]
    fn what_a_point_does_not_name_is_drawn() {
        let space = of(json!({
            "wd": 0.1,
            "opt": {"lr": {"uniform": [0.1, 0.9]}, "momentum": {"uniform": [0.1, 0.9]}, "layers": {"randint": [1, 5]}},
        }));
        let configs = at(&space, 2, json!([{"opt": {"lr": 0.5, "layers": 2.0}}])).unwrap();
        assert_eq!(configs.len(), 2, "a point replaces a sample");
        let configs_of_both = at(&space, 1, json!([{}, {}])).unwrap();
        assert_eq!(configs_of_both.len(), 2, "more points than samples");
        let point = &configs[0];
        assert_eq!(point.parse::<f64>("opt/lr").unwrap(), 0.5);
        assert_eq!(point.value("opt/layers"), Some(&json!(2)), "of its type");
        let momentum: f64 = point.parse("opt/momentum").unwrap();
        assert!((0.1..0.9).contains(&momentum));
        assert_eq!(point.parse::<f64>("wd").unwrap(), 0.1);
        // A value that the point sets determines the option of a choice; other parameters have the same distribution as
        // before.
        let points: Vec<_> = (0..40).map(|_| json!({"opt": {"lr": 0.5}})).collect();
        let mut names = std::collections::BTreeSet::new();
        for config in at(&optimizers(), 40, points.into()).unwrap() {
            assert_eq!(config.parse::<f64>("opt/lr").unwrap(), 0.5);
            names.insert(config.parse::<String>("opt/name").unwrap());
        }
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["adam", "sgd"]);
        let points = json!([{"opt": {"momentum": 0.5}}, {"opt": {"name": "none"}}, {"width": 9}]);
        let configs = at(&optimizers(), 3, points).unwrap();
        assert_eq!(configs[0].parse::<String>("opt/name").unwrap(), "sgd");
        assert_eq!(configs[1].value("opt"), Some(&json!({"name": "none"})));
        assert_eq!(configs[2].value("width"), Some(&json!(9)));
    }

    #[test]
    fn points_cross_the_grids_that_they_do_not_name() {
        let points = json!([{"lr": 0.5}, {"lr": 0.25, "x": 2}, {"x": 3, "y": "b"}]);
        let configs = at(&grid(), 4, points).unwrap();
        let points = shown(&configs);
        assert_eq!(points[..9], WHOLE_GRID);
        assert_eq!(points[9..13], ["2a", "2b", "2c", "3b"]);
        assert_eq!(points[13..], WHOLE_GRID, "one sample is left");
        for config in &configs[..9] {
            assert_eq!(config.parse::<f64>("lr").unwrap(), 0.5);
        }
        // Of options that are tables, those that fit.
        let space = of(
            json!({"opt": {"grid_search": [{"name": "sgd", "nesterov": true},
            {"name": "sgd", "nesterov": false}, {"name": "adam"}]}}),
        );
        let named = |name| at(&space, 1, json!([{"opt": {"name": name}}])).unwrap();
        let configs = named("sgd");
        assert_eq!(configs.len(), 2);
        assert_eq!(configs[1].value("opt/nesterov"), Some(&json!(false)));
        assert_eq!(named("adam").len(), 1);
    }

    #[test]
    fn what_is_no_point_of_the_space_is_an_error_with_its_place() {
        let space = of(json!({
            "lr": {"loguniform": [0.1, 0.9]}, "layers": {"randint": [1, 5]}, "width": {"qrandint": [8, 64, 8]},
            "drop": {"quniform": [0.0, 0.5, 0.1]}, "act": {"choice": ["relu", "gelu"]}, "depth": {"grid_search": [1, 2]},
            "noise": {"randn": [0.0, 1.0]}, "wd": 0.1, "betas": [0.9, {"uniform": [0.9, 1.0]}],
            "opt": {"choice": [{"name": "sgd", "momentum": {"uniform": [0.1, 0.9]}}, {"name": "adam"}]},
            "net": {"head": {"dim": {"randint": [1, 9]}}}, "by": {"sample_from": {"of": "act", "cases": {"relu": {"randint": [1, 5]}}, "otherwise": 3}},
        }));
        let refusals = r#"
{"lr": 77.0} => `lr` is 77.0, where a number from 0.1 to 0.9 is expected
{"lr": "0.5"} => `lr` is "0.5", where a number
{"lr": null} => `lr` is null, where a number
{"lr": "NaN"} => `lr` is "NaN", where a number
{"layers": 2.5} => `layers` is 2.5, where an integer from 1 to 4 is expected
{"layers": 5} => `layers` is 5, where an integer from 1 to 4
{"layers": 1e300} => `layers` is 1e+300, where an integer
{"width": 12} => `width` is 12, where a multiple of 8 from 8 to 64
{"drop": 0.25} => `drop` is 0.25, where a multiple of 0.1 from 0 to 0.5
{"act": "nosuch"} => `act` is "nosuch", where "relu" or "gelu" is expected
{"depth": 3} => `depth` is 3, where 1 or 2 is expected
{"noise": "x"} => `noise` is "x", where a number is expected
{"wd": 0.2} => `wd` is 0.2, where 0.1 is expected
{"betas": [0.9]} => `betas` is [0.9], where [0.9,{"uniform":[0.9,1.0]}] is expected
{"betas": [0.9, 2]} => `betas/1` is 2, where a number from 0.9 to 1 is expected
{"lrr": 0.5} => `lrr` is no parameter; did you mean `lr`? there are act, betas,
{"opt": {"name": "adam", "momentumm": 3}} => `opt/momentumm` is no parameter; did you mean `opt/momentum`? there are opt/momentum, opt/name
{"opt": {"name": "adam", "momentum": 0.5}} => `opt` is {"momentum":0.5,"name":"adam"}, where {"momentum":{"uniform":[0.1,0.9]},"name":"sgd"} or {
{"opt": {"momentum": 2}} => `opt
{"opt": "adam"} => `opt` is "adam", where {
{"net": {"head": {"dimm": 3}}} => `net/head/dimm` is no parameter; did you mean `net/head/dim`?
{"net": 3} => `net` is 3, where {"head":
{"act": "relu", "by": 7} => `by` is 7, where an integer from 1 to 4 is expected"#;
        for refusal in refusals.trim().lines() {
            let (point, expected) = refusal.split_once(" => ").unwrap();
            let point = serde_json::from_str(point).unwrap();
            let variants = VariantGenerator::new(&space, 2, 0).unwrap();
            let error = variants
                .with_points(&[Config::default(), point])
                .unwrap_err();
            assert!(error.is_misuse(), "{error}");
            let said = error.to_string();
            let said = said.strip_prefix("`points_to_evaluate[1]`: ").unwrap();
            assert!(said.starts_with(expected), "{refusal}: {said}");
        }
    }

    proptest::proptest! {
        #[test]
        fn a_configuration_of_the_space_is_the_point_of_itself(seed: u64) {
            let space = optimizers();
            let drawn = all(VariantGenerator::new(&space, 20, seed).unwrap());
            let again = VariantGenerator::new(&space, 20, seed.wrapping_add(1)).unwrap();
            assert_eq!(all(again.with_points(&drawn).unwrap()), drawn);
        }
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
        let last = variants.ask(TrialId::new(1_999_999)).unwrap();
        assert_eq!(last.unwrap().to_string(), r#"{"x":999,"y":999,"z":1}"#);
    }
}
