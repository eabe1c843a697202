"""Jobs of Huawei ModelArts (AICC): their arguments, files that lie elsewhere, ranks that the
platform did not start.
"""
