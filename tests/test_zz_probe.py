import time
from hypothesis import given, settings, strategies as st
from tests import bodies
from tests.strategies import model_specs
T={"local":0,"ranks":0,"n":0, "draw":0}
@settings(max_examples=40)
@given(st.data())
def test_x(four_ranks,data):
    a=time.perf_counter()
    spec=data.draw(model_specs(4)); b=time.perf_counter()
    bodies.train_integers_locally(spec,4,3); c=time.perf_counter()
    four_ranks.run(bodies.train_integers,spec,3,{}); d=time.perf_counter()
    T["draw"]+=b-a;T["local"]+=c-b;T["ranks"]+=d-c;T["n"]+=1
def test_y(): print(T)
