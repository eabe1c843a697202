"""Jobs of Huawei ModelArts (AICC): arguments, files at URLs, and ranks that the platform did not start."""
