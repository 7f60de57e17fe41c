use std::sync::{Arc, Mutex};

use burn::backend::DispatchTensor;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};

use super::backward::{Calibration, depths};
use super::{Anchors, Observer, ProbePoint, watch};
use crate::core::device::tests::devices;

#[derive(Debug, Default)]
struct RecordingObserver(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    depth: Option<usize>,
    points: Vec<usize>,
    calibration: Option<Calibration>,
}

impl Observer for RecordingObserver {
    fn begins(&self, depth: usize) {
        self.0.lock().unwrap().depth = Some(depth);
    }

    fn reached(&self, point: usize, gradients: &mut dyn Iterator<Item = Option<DispatchTensor>>) {
        let mut seen = self.0.lock().unwrap();
        seen.points.push(point);
        if let Some(calibration) = &mut seen.calibration {
            calibration.observe(point, gradients);
        }
    }
}

/// Returns a leaf, which a model would hold as a parameter.
fn leaf(values: [f32; 4], device: &Device) -> Tensor<2> {
    let values = Tensor::from_data(TensorData::new(values.to_vec(), [2, 2]), device);
    Tensor::require_grad(values)
}

fn depth_of(loss: Tensor<1>, anchors: &mut Anchors) -> usize {
    let observer = Arc::new(RecordingObserver::default());
    let watching: Arc<dyn Observer> = observer.clone();
    watch(loss, anchors, Vec::new(), &watching).backward();
    let seen = observer.0.lock().unwrap();
    seen.depth.unwrap()
}

/// Returns the depth of the loss, and the depth at which each leaf's gradient is ready.
fn calibrate(
    loss: impl Fn() -> Tensor<1>,
    leaves: &[&Tensor<2>],
    anchors: &mut Anchors,
) -> (usize, Vec<Option<usize>>) {
    let depth = depth_of(loss(), anchors);
    let depths = depths(depth);
    let probes: Vec<ProbePoint> = depths
        .iter()
        .map(|&depth| ProbePoint {
            depth,
            leaves: leaves
                .iter()
                .map(|&leaf| Some(leaf.clone().into_dispatch()))
                .collect(),
        })
        .collect();
    let observer = Arc::new(RecordingObserver::default());
    observer.0.lock().unwrap().calibration = Some(Calibration::new(leaves.len(), depths));
    let watching: Arc<dyn Observer> = observer.clone();
    let count = probes.len();
    let gradients = watch(loss(), anchors, probes, &watching).backward();
    let plain = loss().backward();
    for leaf in leaves {
        let data = |gradients| leaf.grad(gradients).map(Tensor::into_data);
        assert_eq!(data(&gradients), data(&plain), "the bits of plain Burn");
    }
    let mut seen = observer.0.lock().unwrap();
    assert_eq!(seen.points, (0..count).collect::<Vec<_>>(), "in order");
    let is_final = |index: usize, seen: &DispatchTensor| {
        let gradient = leaves[index].grad(&gradients).map(Tensor::into_dispatch);
        gradient.is_some_and(|gradient| super::is_of(seen, &gradient, None))
    };
    (depth, seen.calibration.take().unwrap().result(is_final))
}

#[test]
fn gradients_are_seen_as_soon_as_they_are_complete_and_not_before() {
    for device in devices() {
        let mut anchors = Anchors::default();
        let first = leaf([1.0, 2.0, 3.0, 4.0], &device);
        let second = leaf([0.5, 0.25, -1.0, 2.0], &device);
        let shared = leaf([1.5, -0.5, 0.75, 1.0], &device);
        let unused = leaf([0.0; 4], &device);
        let loss = || {
            let x = first.clone().matmul(shared.clone());
            let x = relu(x).matmul(second.clone());
            let x = relu(x * 3.0).matmul(shared.clone());
            relu(x).sum()
        };
        // The second pass shows that anchors and leaves outlive a backward pass.
        for _ in 0..2 {
            let leaves = [&first, &second, &shared, &unused];
            let (depth, ready) = calibrate(loss, &leaves, &mut anchors);
            assert!(depth >= 7, "{depth}");
            // The first product, of `first` and `shared`, has depth 1, and that of `second` has depth 3. Observers are
            // one deeper than their anchors.
            assert_eq!(ready, [None, Some(1), None, None]);
        }
    }
}

#[test]
fn a_partial_sum_is_not_taken_for_a_gradient() {
    for device in devices() {
        let mut anchors = Anchors::default();
        let start = leaf([1.0; 4], &device);
        let shared = leaf([1.5, -0.5, 0.75, 1.0], &device);
        // The weight is used at depths 3 and 7.
        let loss = || {
            let x = relu(relu(start.clone())).matmul(shared.clone());
            relu(relu(relu(x))).matmul(shared.clone()).sum()
        };
        let (_, ready) = calibrate(loss, &[&start, &shared], &mut anchors);
        assert_eq!(ready, [None, Some(1)]);
    }
}

#[test]
fn what_follows_a_view_is_late_and_everything_else_early() {
    for device in devices() {
        let mut anchors = Anchors::default();
        let layers: Vec<Linear> = (0..4)
            .map(|_| LinearConfig::new(2, 2).init(&device))
            .collect();
        let x = || Tensor::<2>::ones([3, 2], &device);
        let loss = || {
            layers
                .iter()
                .fold(x(), |x, layer| relu(layer.forward(x)))
                .mean()
        };
        let weights: Vec<Tensor<2>> = layers.iter().map(|layer| layer.weight.val()).collect();
        let (_, ready) = calibrate(loss, &weights.iter().collect::<Vec<_>>(), &mut anchors);
        let [None, rest @ ..] = &ready[..] else {
            panic!("{ready:?}");
        };
        assert!(
            rest.iter().all(Option::is_some) && rest.is_sorted(),
            "{ready:?}"
        );
    }
}

#[test]
fn a_frozen_model_and_a_loss_without_nodes_are_watched_without_harm() {
    for device in devices() {
        let mut anchors = Anchors::default();
        let frozen: Linear = LinearConfig::new(2, 2).init(&device);
        let frozen = frozen.no_grad();
        let own = leaf([1.0, 2.0, 3.0, 4.0], &device);
        let loss = || frozen.forward(own.clone()).mean();
        let (_, ready) = calibrate(loss, &[&frozen.weight.val(), &own], &mut anchors);
        assert_eq!(ready[0], None);
        // The loss itself is a leaf.
        let leaf = Tensor::<1>::ones([1], &device).require_grad();
        let observer: Arc<dyn Observer> = Arc::new(RecordingObserver::default());
        let gradients = watch(leaf.clone(), &mut anchors, Vec::new(), &observer).backward();
        let one = leaf.grad(&gradients).unwrap().into_scalar::<f32>();
        assert_eq!(one, 1.0);
    }
}

#[test]
fn anchors_of_one_strategy_do_not_serve_the_other() {
    let mut anchors = Anchors::default();
    // Burn refuses to mix them, so one chain for both would panic.
    for device in devices() {
        let leaf = leaf([1.0; 4], &device);
        let depth = depth_of(relu(leaf.clone()).sum(), &mut anchors);
        assert_eq!(depth, depth_of(relu(leaf).sum(), &mut anchors));
    }
}

#[test]
fn a_model_is_stepped_and_watched_again() {
    let device = &devices()[0];
    let mut anchors = Anchors::default();
    let mut layer: Linear = LinearConfig::new(2, 2).init(device);
    for _ in 0..3 {
        let input = || Tensor::<2>::ones([1, 2], device);
        let loss = || relu(relu(layer.forward(input()))).mean();
        calibrate(loss, &[&layer.weight.val()], &mut anchors);
        // An optimizer does the same: a new leaf with the same id.
        let weight = layer.weight.val().inner() * 0.5;
        let weight = Tensor::from_inner(weight).require_grad();
        layer.weight = Param::initialized(layer.weight.id, weight);
    }
}
