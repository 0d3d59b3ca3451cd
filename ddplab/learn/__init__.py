"""The ladder: a learner writes a reducer in sixteen rungs, each judged by checks of the conformance kit."""
